# One derivation a check. Each runs a Python script of checks/ in the environment it is about; its report is $out.
{ system, lib, outputs }:
let
  # Their closures hold no wheel twice, and nothing that only builds.
  graphs =
    let size = group: builtins.length (builtins.attrNames (lib.wheelsOf group));
    in {
      demo = size "serve-cpu";
      engine-cpu = size "serve-cpu";
      engine-cuda = size "serve-cuda";
      hyperqwen = size "tools";
    };

  inherit (builtins) baseNameOf elem listToAttrs map path;
  inherit (lib) buildWith layer;

  # check :: name -> environment -> script -> spec -> derivation
  check = name: python: buildWith python "check-${name}";

  repository = path {
    name = "hyperqwen-repository";
    path = ../.;
    # From an archive there is no git to leave out what tools and builds left behind.
    filter = file: type:
      let name = baseNameOf file;
      in !(elem name [ ".git" ".venv" "__pycache__" ]
        || builtins.match "result(-.*)?|[.].*_cache|[.]hypothesis" name != null);
  };

  # pytest in the environment under test: the tests' own tools lie over it.
  testEnvironment = base: layer "${base.name}-tests" ([ base ] ++ lib.testTools);

  pytest = name: python: tests: root: variables: check name python ../checks/pytest_run.py {
    inherit tests root variables;
  };

  # What the engine's tests read: an edit elsewhere does not run them again.
  engineSources = lib.subset ../. [ "checks/engine" "checks/lossless" "checks/routes.py" ];

  # One of our own commands that checks the repository.
  command = name: arguments: check name outputs.hyperqwen ../checks/run.py {
    root = repository;
    arguments = [ "-c" "from hyperqwen.cli import main; main(prog_name='hyperqwen')" ] ++ arguments;
  };

  # Our own tools with pytest, the linters and the types over them.
  developer = layer "hyperqwen-dev" ([ outputs.hyperqwen ] ++ lib.devTools);

  engineTests = testEnvironment outputs.engine-cpu;

  nano = {
    HYPERQWEN_NANO = "${outputs.nano}";
    HYPERQWEN_NANO_INT8 = "${outputs.nano-int8}";
  };

  # The engine with the series less one patch: there, that patch's own test has to fail.
  withoutPatch = entry:
    let env = testEnvironment (lib.engineWithout entry.file);
    in check "needed-${entry.name}" env ../checks/must_fail.py {
      root = lib.subset ../. [
        "checks/engine"
        "checks/lossless"
        "checks/pytest_run.py"
        "checks/routes.py"
        "patches"
        "python/hyperqwen/__init__.py"
        "python/hyperqwen/errors.py"
        "python/hyperqwen/patches"
      ];
      patch = entry.file;
      variables = nano;
    };
in
{
  # A compiler, for the shared libraries of the hosts that the tests record.
  unit = pytest "unit" developer [ "python/tests" ] repository { TESTS_CC = "${outputs.cc}/bin/cc"; };
  lint = check "lint" developer ../checks/lint.py { root = repository; };
  docs = command "docs" [ "docs" "check" ];
  hosts = check "hosts" outputs.hyperqwen ../checks/hosts.py { root = repository; };
  pins = command "pins" [ "pins" "check" ];
  patches = command "patches" [ "patches" "check" "--tree" "${outputs.vllm-source}/site" ];

  imports-tools = check "imports-tools" outputs.hyperqwen ../checks/imports.py { allowed = { }; extra = [ ]; };
  imports-cpu = check "imports-cpu" outputs.engine-cpu ../checks/imports.py {
    allowed = { };
    extra = [ "vllm.entrypoints.openai.api_server" "vllm.model_executor.models.qwen3_5_mtp" ];
  };
  imports-cuda = check "imports-cuda" outputs.engine-cuda ../checks/imports.py {
    # What a box without a GPU cannot load, each for want of the driver's own library.
    allowed = {
      PyNvVideoCodec = "NVIDIA drivers not installed";
      "vllm._C_stable_libtorch" = "libcuda.so.1";
      "vllm._moe_C_stable_libtorch" = "libcuda.so.1";
      "vllm.cumem_allocator" = "libcuda.so.1";
      # A build leftover of two wheels, which the environment leaves out.
      build_backend = "No module named 'build_backend'";
    };
    extra = [
      "vllm._C_stable_libtorch"
      "vllm._moe_C_stable_libtorch"
      "vllm.cumem_allocator"
      "vllm.entrypoints.openai.api_server"
      "vllm.model_executor.models.qwen3_5_mtp"
    ];
  };

  units = check "units" outputs.hyperqwen ../checks/units.py { inherit (lib) units; tools = outputs.systemd-tools; };
  unit-start = check "unit-start" outputs.hyperqwen ../checks/unit_start.py {
    unit = outputs.unit-demo;
    tools = outputs.systemd-tools;
    confine = ../checks/confine.py;
  };

  closure = check "closure" outputs.hyperqwen ../checks/closure.py {
    derivationArgs.exportReferencesGraph = builtins.concatMap (name: [ name outputs.${name} ])
      (builtins.attrNames graphs);
    inherit graphs;
    wheels = map (wheel: "${wheel.name}-${wheel.version}") lib.pins.wheels;
  };

  # A host with fetchers of its own (lib/pin.nix) gets the same outputs, whatever they are.
  fetchers =
    let
      fixed = name: mode: sha256: derivation {
        inherit name system;
        builder = "builtin:fetchurl";
        url = "file:///nonexistent/${name}";
        outputHashMode = mode;
        outputHashAlgo = "sha256";
        outputHash = sha256;
      };
      elsewhere = import ./. {
        inherit system;
        fetchers.file = pin: fixed pin.file "flat" pin.sha256;
        fetchers.extract = deb: fixed deb.extract.store_name "recursive" deb.extract.nar_sha256;
      };
      # nixpkgs' own, and the overlay that uses them.
      nixpkgs = import ./nixos/nixpkgs.nix { inherit system; busybox = lib.seed; };
      overlaid = (import ./nixos/overlay.nix nixpkgs nixpkgs).hyperqwen;
      # Really extracted: without its hash, so that it is built, and of a package that is in the store as it is.
      extracting = import ./nixos/fetchers.nix {
        pkgs = nixpkgs // {
          runCommand = name: variables: nixpkgs.runCommand name
            (removeAttrs variables [ "outputHash" "outputHashAlgo" "outputHashMode" ]);
        };
      };
      extract = { store_name = "bubblewrap"; member = "./usr/bin/bwrap"; path = "bin/bwrap"; nar_sha256 = ""; };
      bubblewrap = builtins.head (builtins.filter (deb: deb.name == "bubblewrap") lib.pins.debs);

      # Not serve-cpu: nano is content-addressed, and has no path before it is built.
      names = [ "runtime" "engine-cpu" "engine-cuda" "serve-cuda" ];
      path = outputs: name: builtins.unsafeDiscardStringContext outputs.${name}.outPath;
      paths = outputs: map (path outputs) names;
    in
    check "fetchers" outputs.hyperqwen ../checks/fetchers.py {
      inherit names extract;
      ours = paths outputs;
      theirs = {
        "another fetcher" = paths elsewhere.packages.${system};
        "the overlay" = paths overlaid;
      };
      deb = "${extracting.file bubblewrap}";
      extracted = "${extracting.extract (bubblewrap // { inherit extract; })}";
    };

  nixos = check "nixos" outputs.hyperqwen ../checks/nixos.py {
    inherit (lib.nixos) counts examples failures options unbuilt;
    docs = ../docs/nixos.md;
    root = lib.subset ../. [ "checks/units.py" ];
    tools = outputs.systemd-tools;
  };

  oci = check "oci" outputs.hyperqwen ../checks/oci.py (lib.oci.checked // {
    tools = outputs.oci-tools;
    nano = outputs.nano;
  });

  argv = check "argv" outputs.engine-cpu ../checks/argv.py { inherit (outputs) plans; };
  compiler = check "compiler" outputs.engine-cpu ../checks/compiler.py { inherit (outputs) cc runtime; };
  cuda-home = check "cuda-home" outputs.engine-cuda ../checks/cuda_home.py {
    inherit (outputs) cc cuda-home;
    tools = outputs.oci-tools;
    busybox = "${lib.seed}/bin/busybox";
    root = lib.subset ../. [
      "python/hyperqwen/__init__.py"
      "python/hyperqwen/errors.py"
      "python/hyperqwen/profiles/__init__.py"
      "python/hyperqwen/profiles/cards.py"
      "python/hyperqwen/runtime/__init__.py"
      "python/hyperqwen/runtime/environment.py"
    ];
  };

  routes = check "routes" outputs.engine-cpu ../checks/run.py {
    arguments = [ "checks/routes.py" ];
    root = lib.subset ../. [ "checks/pytest_run.py" "checks/routes.py" ];
  };
  memory-law = check "memory-law" outputs.engine-cpu ../checks/run.py {
    arguments = [ "checks/memory_law.py" "--model" "${outputs.nano}" ];
    root = lib.subset ../. [
      "checks/memory_law.py"
      "checks/pytest_run.py"
      "prepare/models"
      "python/hyperqwen/__init__.py"
      "python/hyperqwen/engine"
      "python/hyperqwen/errors.py"
      "python/hyperqwen/prepare/__init__.py"
      "python/hyperqwen/prepare/geometry.py"
      "python/hyperqwen/prepare/weights.py"
      "python/hyperqwen/profiles/__init__.py"
      "python/hyperqwen/profiles/cards.py"
      "python/hyperqwen/profiles/memory.py"
      "python/hyperqwen/share.py"
    ];
  };
  engine = pytest "engine" engineTests [ "checks/engine" ] engineSources nano;
  serve = check "serve" outputs.hyperqwen ../checks/serve.py {
    demo = outputs.demo;
    serve = outputs.serve-cpu;
    nano = outputs.nano;
  };
  lossless = pytest "lossless" engineTests [ "checks/lossless" ] engineSources nano;
} // listToAttrs (map (entry: { name = "needed-${entry.name}"; value = withoutPatch entry; }) lib.patchList)
