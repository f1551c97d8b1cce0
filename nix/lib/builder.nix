# A derivation whose builder is a Python script: no shell, no stdenv. The script reads its inputs from the JSON file
# that $specPath names and writes to $out.
{ system, python }:

name: script: spec:
derivation ({
  inherit name system;
  builder = "${python}/bin/python3";
  # -I: else sys.path[0] is the store itself, and PYTHON* of the caller count.
  args = [ "-I" "-B" script ];
  # Nix gives argv[0] as a bare name; Python finds its own prefix by looking that up in PATH.
  PATH = "${python}/bin";
  LC_ALL = "C.UTF-8";
  spec = builtins.toJSON (removeAttrs spec [ "derivationArgs" ]);
  passAsFile = [ "spec" ];
} // (spec.derivationArgs or { }))
