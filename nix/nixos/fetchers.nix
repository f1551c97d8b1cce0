# The pins by nixpkgs' own fetchers, as lib/pin.nix takes them. A path follows from name and hash, so these are the ones
# that `hyperqwen fetch` seeds. nixpkgs knows the hosts; here is only what a pin is called there.
{ pkgs
, urls ? { } # file name of a pin -> [ URL ], for a host with a mirror of its own
}:
let
  inherit (builtins) elemAt match;

  # A wheel's name is distribution-version-python-abi-platform (PEP 427); none of the pins has a build tag.
  wheel = pin:
    let part = elemAt (match "([^-]+)-([^-]+)-([^-]+)-([^-]+)-([^-]+)[.]whl" pin.file);
    in pkgs.fetchPypi {
      format = "wheel";
      pname = part 0;
      version = part 1;
      # The index sorts its files by the Python tag.
      dist = part 2;
      python = part 2;
      abi = part 3;
      platform = part 4;
      inherit (pin) sha256;
    };

  deb = pin: pkgs.fetchurl {
    # Store names have no colon and no tilde, which file names of the pool may have.
    name = pin.file;
    url = "mirror://debian/${pin.pool}";
    inherit (pin) sha256;
  };

  file = pin:
    if urls ? ${pin.file} then pkgs.fetchurl { name = pin.file; urls = urls.${pin.file}; inherit (pin) sha256; }
    else if pin ? pool then deb pin
    else wheel pin;

  # One program out of a package, with the NAR hash that the pin gives.
  extract = pin: pkgs.runCommand pin.extract.store_name
    {
      deb = file pin;
      inherit (pin.extract) member path;
      nativeBuildInputs = [ pkgs.dpkg ];
      outputHashMode = "recursive";
      outputHashAlgo = "sha256";
      outputHash = pin.extract.nar_sha256;
    } ''
    dpkg-deb -x "$deb" unpacked
    mkdir -p "$out/''${path%/*}"
    cp "unpacked/$member" "$out/$path"
    chmod 755 "$out/$path"
  '';
in
{ inherit file extract; }
