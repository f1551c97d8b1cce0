# Container images. A layer is a derivation of its own, lowest what changes least, so that a changed patch writes the
# last two again and no gigabytes. `nix run .#oci` needs no layer: it reads the same store paths by the same code.
{ build # with the stage's Python
, buildWith
, sources
, program
, hyperqwen
, seed
, runtime
, base # [ path ]: what everything stands on, besides the runtime
, engines # { cuda, cpu }: { wheels, dependencies, vllm, engine, launcher, more }; changed: an engine with other patches
}:
let
  inherit (builtins) attrNames attrValues concatLists elem elemAt filter foldl' fromTOML genList length listToAttrs map
    mapAttrs match readDir readFile;

  # What layers depend on: an edit of a command writes none of them again.
  writer = sources ([ "hyperqwen/__init__.py" "hyperqwen/errors.py" ]
    ++ map (module: "hyperqwen/delivery/${module}.py") [ "__init__" "image" "rootfs" ]);

  entryArguments = {
    base = { busybox = "${seed}"; runtime = "${runtime}"; };
    code = { hyperqwen = "${hyperqwen}"; };
  };

  named = part: wheels: attrValues (removeAttrs wheels (filter (name: !(part name)) (attrNames wheels)));
  isCuda = name: match "nvidia-.*|cuda-.*" name != null;
  isTorch = name: elem name [ "torch" "torchvision" "torchaudio" "triton" ];

  # partsOf :: engine -> [ { name; roots; } ], the lowest first. A path is in the lowest layer that needs it.
  partsOf = e: [
    { name = "base"; roots = base ++ [ seed runtime ]; }
    { name = "cuda"; roots = named isCuda e.wheels; }
    { name = "torch"; roots = named isTorch e.wheels; }
    { name = "wheels"; roots = e.dependencies; }
    { name = "vllm"; roots = e.vllm; }
    { name = "engine"; roots = [ e.engine ]; }
    { name = "code"; roots = [ e.launcher hyperqwen ] ++ e.more; }
  ];

  graphs = prefix: roots:
    concatLists (genList (i: [ "${prefix}-${toString i}" (elemAt roots i) ]) (length roots));

  # layersOf :: [ part ] -> { name = derivation; }. A layer has to know those below it only to leave out what they have.
  layersOf = parts: (foldl'
    (done: part: {
      below = done.below ++ part.roots;
      layers = done.layers // {
        ${part.name} = build "oci-layer-${part.name}" ./build/oci_layer.py {
          inherit writer;
          inherit (part) name;
          arguments = entryArguments.${part.name} or { };
          below = map toString done.below;
          roots = map toString part.roots;
          derivationArgs.exportReferencesGraph = graphs "below" done.below ++ graphs "root" part.roots;
        };
      };
    })
    { below = [ ]; layers = { }; }
    parts).layers;

  # profiles :: { name = device; }
  profiles = listToAttrs (map
    (file:
      let profile = fromTOML (readFile (../profiles + "/${file}"));
      in { inherit (profile) name; value = profile.device; })
    (filter (file: match ".*[.]toml" file != null) (attrNames (readDir ../profiles))));

  # What an image is made of, as one JSON file. It refers to all of it, and so do the programs that have it.
  describe = profile: engine:
    let parts = partsOf engine;
    in buildWith hyperqwen "oci-spec-${profile}" ./build/oci_spec.py {
      inherit profile entryArguments;
      program = "${engine.launcher}/bin/hyperqwen-serve";
      layers = map (part: { inherit (part) name; roots = map toString part.roots; }) parts;
      derivationArgs.exportReferencesGraph = graphs "root" (concatLists (map (part: part.roots) parts));
    };
  specs = mapAttrs (profile: device: describe profile engines.${device}) profiles;

  store = name: profile: build "oci-${name}" ./build/oci_image.py {
    inherit writer;
    spec = specs.${profile};
    layers =
      let parts = partsOf engines.${profiles.${profile}}; layers = layersOf parts;
      in map (part: layers.${part.name}) parts;
  };

  # stream :: name -> { profile = description; } -> [ argument ] -> program that writes an image out of the store
  stream = name: images: arguments:
    program name "HYPERQWEN_OCI_CONFIG" { images = mapAttrs (_: toString) images; }
      ([ "oci" "write" ] ++ arguments);
  only = name: profile: {
    name = "oci-${name}";
    value = {
      image = store name profile;
      program = stream "oci-${name}" { ${profile} = specs.${profile}; } [ "--profile" profile ];
    };
  };
  images = listToAttrs [ (only "single" "B") (only "batch" "A") (only "demo" "demo") ];

  containers = profile: buildWith hyperqwen "containers-${profile}" ./build/oci_files.py { inherit profile; };
in
{
  packages = mapAttrs (_: image: image.image) images
    // listToAttrs (map (profile: { name = "containers-${profile}"; value = containers profile; }) (attrNames profiles))
    // listToAttrs (map (profile: { name = "oci-spec-${profile}"; value = specs.${profile}; }) (attrNames profiles));
  # What the check is about: every description, the demo's with another engine, and its layers as they are stored.
  checked = {
    inherit specs;
    changed = describe "demo" (engines.cpu // engines.changed);
    stored = { inherit (layersOf (partsOf engines.cpu)) engine code; };
  };
  # `nix build` stores an image, `nix run` streams it.
  programs = mapAttrs (_: image: image.program) images // { oci = stream "oci" specs [ ]; };
}
