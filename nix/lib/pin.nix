# A pin is a fixed-output derivation of a known name and sha256. Nothing is downloaded in a build: the bytes are seeded
# beforehand (`./hq`, `hyperqwen fetch`), where any fetcher of the same name and hash gives the same path.
# `fetchers` replaces that: a NixOS host passes nixpkgs' own, and needs no seeding.
{ system
, pins # { wheels; debs; } as read from nix/pins/*.json
, fetchers ? { }
}:
let
  inherit (builtins) elem filter listToAttrs throw;

  # The seed is the one pin that cannot use busybox to say what is missing, so its builder's name is the message.
  seedMissing = file: "/${file} is not in the store: run ./hq fetch --files ${file}";

  seed =
    let
      deb = one "deb" "busybox-static" (filter (d: d.name == "busybox-static") pins.debs);
    in
    (fetchers.extract or (d: derivation ({
      inherit system;
      name = d.extract.store_name;
      builder = seedMissing d.extract.store_name;
      outputHashMode = "recursive";
      outputHashAlgo = "sha256";
      outputHash = d.extract.nar_sha256;
    } // local))) deb;

  missing = file: derivation ({
    inherit system;
    name = file.file;
    builder = "${seed}/bin/busybox";
    args = [ "sh" "-c" ''echo "$name is not in the store: run ./hq fetch --files $name" >&2; exit 1'' ];
    outputHashMode = "flat";
    outputHashAlgo = "sha256";
    outputHash = file.sha256;
  } // local);

  # Each missing pin must say so: a build farm must not be asked for bytes that only this host can bring.
  local = {
    preferLocalBuild = true;
    allowSubstitutes = false;
  };

  one = kind: name: found:
    if found == [ ] then
      throw "no ${kind} pin is called '${name}': add it to nix/pins/groups.toml and run 'hyperqwen pins update'"
    else builtins.head found;

  inGroup = group: filter (p: elem group p.groups);

  named = list: listToAttrs (map (p: { inherit (p) name; value = p; }) list);
in
{
  inherit seed;

  # requirePin :: pin -> derivation of exactly these bytes
  requirePin = fetchers.file or missing;

  # wheelsOf, debsOf :: group -> { name = pin; }
  wheelsOf = group: named (inGroup group pins.wheels);
  debsOf = group: inGroup group pins.debs;

  # wheelNamed :: group -> name -> pin
  wheelNamed = group: name: one "wheel" name (filter (p: p.name == name) (inGroup group pins.wheels));
}
