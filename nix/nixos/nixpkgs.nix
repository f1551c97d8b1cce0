# What the module and the fetchers use of nixpkgs, for a box without it: functions that make what nixpkgs' own make, by
# the rules that matter here (names, hashes, what a builder finds). They fetch nothing: the pins are in the store.
{ system
, busybox # a folder with bin/busybox
}:
let
  inherit (builtins) baseNameOf head substring;
in
rec {
  stdenv.hostPlatform = { inherit system; };

  fetchurl = { url ? head urls, urls ? [ url ], name ? baseNameOf url, sha256 }: derivation {
    inherit name url system;
    builder = "builtin:fetchurl";
    outputHashMode = "flat";
    outputHashAlgo = "sha256";
    outputHash = sha256;
  };

  # Named as the file on the index, which says where a wheel is by its tags alone.
  fetchPypi = { pname, version, format, dist, python, abi, platform, sha256 }:
    if format != "wheel" then throw "fetchPypi: ${pname} is asked for as ${format}"
    else fetchurl {
      url = "mirror://index/${dist}/${substring 0 1 pname}/${pname}"
        + "/${pname}-${version}-${python}-${abi}-${platform}.whl";
      inherit sha256;
    };

  # busybox has the one program of dpkg that is used, those of stdenv, and what dpkg-deb calls by name.
  dpkg = busybox;
  runCommand = name: variables: script: derivation ({
    inherit name system busybox;
    builder = "${busybox}/bin/busybox";
    args = [
      "sh"
      "-euc"
      ''
        for tool in chmod cp dpkg-deb mkdir tar unxz xz xzcat; do
          "$busybox/bin/busybox" ln -s "$busybox/bin/busybox" "$tool"
        done
        PATH=$PWD
        ${script}
      ''
    ];
  } // variables);
}
