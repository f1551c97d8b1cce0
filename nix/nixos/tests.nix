# What the module does with the examples, and with configurations that it must refuse: `failures` is empty. The rest is
# for checks/nixos.py, which also reads the files that the units point at.
{ pkgs
, nixpkgsLib ? builtins.getEnv "NIXPKGS_LIB"
}:
let
  inherit (builtins)
    attrNames concatMap deepSeq elemAt filter fromJSON head length listToAttrs map mapAttrs match readDir toJSON
    tryEval;
  nixos = import ./evaluate.nix { inherit pkgs nixpkgsLib; };
  inherit (nixos) evaluate lib;
  real = nixpkgsLib != "";

  failing = config: map (assertion: assertion.message) (filter (assertion: !assertion.assertion) config.assertions);
  hostFileOf = config: config.environment.etc."hyperqwen/host.toml".source;

  # Examples -----------------------------------------------------------------------------------------------------------
  exampleNames = concatMap
    (file: let name = match "(.*)[.]nix" file; in lib.optional (name != null) (head name))
    (attrNames (readDir ./examples));
  examples = listToAttrs (map (name: { inherit name; value = evaluate (./examples + "/${name}.nix"); }) exampleNames);
  exampleFailures = concatMap
    (name:
      let result = examples.${name};
      in map (text: "examples/${name}.nix: ${text}")
        (if result.problems != [ ] then result.problems else failing result.config))
    exampleNames;

  # Refused ------------------------------------------------------------------------------------------------------------
  at = "services.hyperqwen";
  second = "${at}.instances.second";
  driver = {
    hardware.graphics.enable = true;
    hardware.nvidia.open = true;
    services.xserver.videoDrivers = [ "nvidia" ];
  };
  with' = hyperqwen: {
    imports = [ driver ];
    services.hyperqwen = { enable = true; modelDir = "/srv/models"; } // hyperqwen;
  };
  # One server beside the default one.
  two = hyperqwen: second: with' (hyperqwen // { instances = { inherit second; }; });
  keyFix = "Fix: ${at}.apiKeyFile = \"/run/secrets/hyperqwen\";";
  nameFix = "Fix: use small letters, digits and - alone.";
  driverFix = "Fix: services.xserver.videoDrivers = [ \"nvidia\" ]; (no display is needed) and "
    + "hardware.nvidia.open = true; and, the driver being unfree, "
    + "nixpkgs.config.allowUnfreePredicate = "
    + "pkg: builtins.elem (lib.getName pkg) [ \"nvidia-x11\" \"nvidia-settings\" \"nvidia-persistenced\" ];";
  says = message: configuration: { inherit configuration; messages = [ message ]; };

  # Each fails with exactly these assertions.
  refused = [
    (says
      ("${at}.modelDir is not set, and profile B serves a prepared model. "
        + "Fix: ${at}.modelDir = \"/var/lib/models\"; with what 'hyperqwen prepare' wrote in it.")
      (with' { modelDir = null; }))
    (says
      ("${at}.modelDir is a path, which Nix copies to the store: tens of GB. "
        + "Fix: quote it: ${at}.modelDir = \"/srv/models\";")
      (with' { modelDir = /srv/models; }))
    (says "${at}.modelDir is /srv/my models. Fix: use letters, digits and . _ - + @ / alone."
      (with' { modelDir = "/srv/my models"; }))
    (says
      ("${at}.apiKeyFile is /etc/key, and every user of the host can read what is in the store or copied to it. "
        + "Fix: name a file outside as text, such as ${at}.apiKeyFile = \"/run/secrets/hyperqwen\";")
      (with' { apiKeyFile = /etc/key; }))
    (says
      ("${at}.apiKeyFile is ${builtins.storeDir}/x-key, and every user of the host can read what is in the store or "
        + "copied to it. Fix: name a file outside as text, such as ${at}.apiKeyFile = \"/run/secrets/hyperqwen\";")
      (with' { apiKeyFile = "${builtins.storeDir}/x-key"; }))
    (says "${at}.apiKeyFile is /run/my key. Fix: use letters, digits and . _ - + @ / alone."
      (with' { apiKeyFile = "/run/my key"; }))
    (says "${at}.host is 0.0.0.0, so that others can reach the server, and there is no key. ${keyFix}"
      (with' { host = "0.0.0.0"; clients = [ "any" ]; }))
    (says
      ("${at}.host is ::, and the service lets nobody but this host in. "
        + "Fix: ${at}.clients = [ \"192.168.0.0/16\" ]; or [ \"any\" ].")
      (with' { host = "::"; apiKeyFile = "/run/key"; }))
    (says
      ("${at}.clients names networks, but ${at}.host is 127.0.0.1, which none of them reaches. "
        + "Fix: ${at}.host = \"0.0.0.0\"; or leave clients out.")
      (with' { clients = [ "any" ]; }))
    (says
      ("${at}.openFirewall opens port 18020, but ${at}.host is 127.0.0.1, where nobody outside reaches it. "
        + "Fix: ${at}.host = \"0.0.0.0\"; or ${at}.openFirewall = false;")
      (with' { openFirewall = true; apiKeyFile = "/run/key"; }))
    {
      configuration = with' { openFirewall = true; host = "0.0.0.0"; clients = [ "any" ]; };
      messages = [
        "${at}.host is 0.0.0.0, so that others can reach the server, and there is no key. ${keyFix}"
        "${at}.openFirewall lets others reach the server, and there is no key. ${keyFix}"
      ];
    }
    (says "${at}.port is 0, which is no port to listen on. Fix: ${at}.port = 18020;" (with' { port = 0; }))
    (says
      ("${at}.profile is /etc/mine.toml, which is not there while the host is built. "
        + "Fix: name one of A, B, C, D, E, demo, or a file, unquoted: ./mine.toml.")
      (with' { profile = "/etc/mine.toml"; }))
    (says "${at}.settings.server.port has an option of its own. Fix: set ${at}.port instead."
      (with' { settings.server.port = 1; }))
    (says "${at}.settings.parallel.gpus has an option of its own. Fix: set ${at}.gpus instead."
      (with' { settings.parallel.gpus = "0"; }))
    (says
      "${at}.gpus names 2 cards, and the model is shared by 1. Fix: ${at}.settings.parallel.tensor = 2;"
      (with' { gpus = [ 0 1 ]; }))
    (says "${at}.gpus names a card twice: [1,1]. Fix: name each card once."
      (with' { gpus = [ 1 1 ]; settings.parallel.tensor = 2; }))
    (says
      ("${at}.gpus names MIG-6f, a MIG instance, and hyperqwen plans for whole cards. "
        + "Fix: turn MIG off on that card, and name its index or the UUID that nvidia-smi -L says.")
      (with' { gpus = [ "MIG-6f" ]; }))
    (says "${at}.gpus is set, but profile demo runs on the CPU. Fix: leave it out."
      (with' { profile = "demo"; gpus = [ 0 ]; }))
    (says "${at}.settings has a number that this Nix writes with six digits. Fix: shorten it to six."
      (with' { settings.memory.utilization = 0.93000001; }))

    (says "${at} and ${second} both listen on port 18020. Fix: ${second}.port = 18021;"
      (two { } { modelDir = "/srv/models"; gpus = [ 1 ]; }))
    (says "${at} and ${second} both listen on port 18020. Fix: ${second}.port = 18022;"
      (with' { instances = { second.profile = "demo"; third = { profile = "demo"; port = 18021; }; }; }))
    (says
      "${at} and ${second} both use card 0, and each plans with all of it. Fix: ${second}.gpus = [ 1 ];"
      (two { } { modelDir = "/srv/models"; port = 18021; }))
    (says
      "${at} and ${second} both use card GPU-1, and each plans with all of it. Fix: give ${second} other cards."
      (two { gpus = [ "GPU-1" ]; } { modelDir = "/srv/models"; port = 18021; gpus = [ "GPU-1" ]; }))
    (says
      ("${at} and ${second} name their cards in two ways, so that nothing tells whether they share one. "
        + "Fix: set ${second}.gpus the way ${at} does: by index.")
      (two { } { modelDir = "/srv/models"; port = 18021; gpus = [ "GPU-1" ]; }))
    (says "${at}.instances.A b: an instance's name becomes that of a unit and of folders. ${nameFix}"
      (with' { enable = false; instances."A b" = { profile = "demo"; }; }))
    (says "${at}.instances.models: below /var/lib/hyperqwen, models is taken. Fix: give the instance another name."
      (with' { enable = false; instances.models = { profile = "demo"; }; }))

    (says "${at} needs NVIDIA's driver. ${driverFix}"
      (with' { } // { imports = [ { hardware.graphics.enable = true; } ]; }))
    (says
      ("${at} finds the driver's libraries where hardware.graphics links them. "
        + "Fix: hardware.graphics.enable = true;")
      (with' { } // {
        imports = [ { hardware.nvidia.open = true; services.xserver.videoDrivers = [ "nvidia" ]; } ];
      }))
    # What nixpkgs' own module insists on, in host.nix's words.
    (says "hardware.nvidia.open has to be set for driver 560 or newer."
      (with' { } // {
        imports = [ { hardware.graphics.enable = true; services.xserver.videoDrivers = [ "nvidia" ]; } ];
      }))
    (says
      ("${at}: hardware.nvidia.package is driver 570.86.16, and CUDA 13.0 needs 580.65.06. "
        + "Fix: hardware.nvidia.package = config.boot.kernelPackages.nvidiaPackages.latest;")
      (with' { } // { hardware.nvidia.package.version = "570.86.16"; }))
    (says "${at} needs the driver of Windows under WSL. Fix: wsl.useWindowsDriver = true;"
      (with' { } // { imports = [ { wsl.enable = true; } ]; }))
  ];

  # Each is no value of its option: [ option, configuration, what the harness says ]; no option is called null's. The
  # words are the harness's own, and nixpkgs has others: under its lib an evaluation has to stop, whatever it says.
  mistyped = [
    [ "profile" (with' { profile = "Z"; })
      "The option `${at}.profile' is \"Z\" in a module; it has to be ${profileTypes}." ]
    [ "port" (with' { port = "18020"; })
      "The option `${at}.port' is \"18020\" in a module; it has to be ${portTypes}." ]
    [ "port" (with' { port = 65536; }) "The option `${at}.port' is 65536 in a module; it has to be ${portTypes}." ]
    [ "openFirewall" (with' { openFirewall = "yes"; })
      "The option `${at}.openFirewall' is \"yes\" in a module; it has to be true or false." ]
    [ "settings" (with' { settings.limits.context_tokens = 8; })
      ("The option `${at}.settings.limits.context_tokens' is 8 in a module; "
        + "it has to be null or a whole number from 16 to 1010000.") ]
    [ "settings" (with' { settings.speculation.method = "mpt"; })
      ("The option `${at}.settings.speculation.method' is \"mpt\" in a module; "
        + "it has to be null or one of \"off\", \"mtp\", \"dflash2\", \"ngram\".") ]
    [ "settings" (with' { settings.cache.prefix = "true"; })
      "The option `${at}.settings.cache.prefix' is \"true\" in a module; it has to be null or true or false." ]
    [ "gpus" (with' { gpus = "0"; }) "The option `${at}.gpus' is \"0\" in a module; it has to be ${gpuTypes}." ]
    [ null (with' { modelDirectory = "/srv"; })
      "The option `${at}.modelDirectory' does not exist (\"/srv\" in a module)." ]
    [ "instances" (two { } { modelDir = "/srv/models"; port = -1; gpus = [ 1 ]; })
      "The option `${second}.port' is -1 in a module; it has to be ${portTypes}." ]
  ];
  portTypes = "a whole number from 0 to 65535";
  gpuTypes = "a list, each a whole number from 0 or text that matches (GPU|MIG)-[0-9A-Za-z/-]+";
  profileTypes = "one of \"A\", \"B\", \"C\", \"D\", \"E\", \"demo\" or an absolute path";

  # What passes evaluation, and the build of the host file refuses with these words.
  unbuilt = map
    ({ settings, says }: { inherit says; arguments = argumentsOf (evaluate (with' { inherit settings; })).config; })
    [
      {
        settings.limits.context_token = 8192;
        says = "1 problem in ${at}.settings:\n  limits.context_token is not a field; did you mean 'context_tokens'?";
      }
      {
        settings.limit.context_tokens = 8192;
        says = "1 problem in ${at}.settings:\n  limit is not a field; did you mean 'limits'?";
      }
      {
        settings.memory.utilization = 0;
        says = "1 problem in ${at}.settings:\n  memory.utilization is 0 (a whole number); it must be greater than 0";
      }
      {
        settings.cache.retention_blocks = null;
        says = "${at}.settings.cache.retention_blocks is null\n  fix: leave it out to keep the profile's value";
      }
      {
        settings.parallel.tensor = 3;
        says = "parallel.tensor is 3 (${at}.settings): num_key_value_heads of qwen3.8-27b is 4, "
          + "which 3 cards can neither share nor repeat\n  fix: use 1 or 2 or 4 or 8";
      }
      {
        settings.device = "cpu";
        says = "${at}.settings sets device, which only a profile has\n"
          + "  fix: take it out; a host file has sections of knobs alone";
      }
    ];
  argumentsOf = config: (fromJSON (hostFileOf config).spec).arguments;

  # Failures -----------------------------------------------------------------------------------------------------------
  differs = what: got: want: lib.optional (got != want) "${what}:\n  got  ${toJSON got}\n  want ${toJSON want}";
  refusedFailures = concatMap
    (case:
      differs (head case.messages) (failing (evaluate case.configuration).config) case.messages)
    refused;
  mistypedFailures = concatMap
    (case:
      let
        option = elemAt case 0;
        result = evaluate (elemAt case 1);
        says = elemAt case 2;
        inherit (result.parts.services.parts.hyperqwen) parts stray;
        # An unknown option stops every use of the configuration, a wrong value that of the option.
        used = if option == null then result.config.services else result.config.services.hyperqwen.${option};
        stopped = !(tryEval (deepSeq used null)).success;
      in
      lib.optional (!stopped) "evaluates, and should not: ${says}"
      ++ lib.optionals (!real)
        (differs "the harness" (if option == null then stray else parts.${option}.problems) [ says ]))
    mistyped;
  harnessFailures = concatMap (test: differs "the module system: ${test.name}" test.got test.want)
    (import ./harness-tests.nix { inherit lib; });

  # What an example says of each service, for whoever checks what came of it.
  instancesOf = config:
    let
      all = config.services.hyperqwen;
      of = instance: {
        inherit (instance) profile host port gpus clients modelDir apiKeyFile;
        settings = mapAttrs (_: lib.filterAttrs (_: value: value != null)) instance.settings;
      };
      on = name: instance: lib.optional instance.enable { inherit name; value = of instance; };
    in
    listToAttrs (on "hyperqwen" all ++ concatMap
      (name: on "hyperqwen-${name}" all.instances.${name})
      (attrNames all.instances));

  # What the module leaves alone.
  idle = evaluate { services.hyperqwen.instances.off.enable = false; };
  idleFailures = differs "a host without hyperqwen"
    { inherit (idle.config) assertions networking; inherit (idle.config.systemd) services; }
    { assertions = [ ]; networking.firewall.allowedTCPPorts = [ ]; services = { }; };

  # Another pkgs: without the overlay the module makes the same packages itself; on another system it says so.
  exampleWith = pkgs: (import ./evaluate.nix { inherit pkgs nixpkgsLib; }).evaluate ./examples/B.nix;
  commandOf = result: result.config.systemd.services.hyperqwen.serviceConfig.ExecStart;
  otherPkgsFailures =
    differs "the command without the overlay"
      (commandOf (exampleWith (removeAttrs pkgs [ "hyperqwen" ])))
      (commandOf examples.B)
    ++ differs "a host of another system"
      (failing (exampleWith (pkgs // { stdenv.hostPlatform.system = "aarch64-linux"; })).config)
      [ "${at}: hyperqwen is built for x86_64-linux, and this host is aarch64-linux. Fix: ${at}.enable = false;" ];

  # What is said here of nixpkgs' own lib, which has none of the harness's texts.
  bare = import ./tests.nix { inherit pkgs; nixpkgsLib = toString ./bare-lib.nix; };
  bareFailures = lib.optionals (!real) (map (text: "under a lib like nixpkgs': ${text}") bare.failures);
in
{
  testedWith = if real then nixpkgsLib else "harness";
  failures = exampleFailures ++ refusedFailures ++ mistypedFailures ++ harnessFailures ++ idleFailures
    ++ otherPkgsFailures ++ bareFailures;

  counts = {
    examples = length exampleNames;
    refused = length refused;
    mistyped = length mistyped;
    harness = length (import ./harness-tests.nix { inherit lib; });
  };
  inherit unbuilt;
  # name -> { services; instances; ports; }, with the host files as dependencies
  examples = mapAttrs
    (_: { config, ... }: {
      inherit (config.systemd) services;
      instances = instancesOf config;
      ports = config.networking.firewall.allowedTCPPorts;
      etc = mapAttrs (_: file: "${file.source}") config.environment.etc;
    })
    examples;
  options = attrNames idle.options.services.hyperqwen;
}
