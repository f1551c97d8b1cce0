# services.hyperqwen: the default instance by the options themselves, more of them below instances. Every problem that
# can be seen before the host is built is an assertion with its fix; what only the schema can see fails the build of the
# host file, with the schema's own message.
{ config, lib, pkgs, ... }:
let
  inherit (builtins)
    all any attrNames attrValues compareVersions concatLists concatMap concatStringsSep elem elemAt filter fromJSON
    fromTOML genList head isAttrs isFloat isInt isList isPath length listToAttrs map mapAttrs match readDir readFile
    removeAttrs replaceStrings storeDir toJSON unsafeDiscardStringContext;
  inherit (lib) mkEnableOption mkIf mkOption types;

  cfg = config.services.hyperqwen;
  schema = fromJSON (readFile ./options.json);
  shared = fromJSON (readFile ./service.json);

  # The overlay's packages where it is in use, else the same built with this host's fetchers.
  packages = pkgs.hyperqwen or (import ./overlay.nix pkgs pkgs).hyperqwen;
  inherit (pkgs.stdenv.hostPlatform) system;

  # Profiles and knobs -------------------------------------------------------------------------------------------------
  profileFiles = listToAttrs (concatMap
    (file:
      let name = match "(.*)[.]toml" file;
      in lib.optional (name != null) { name = head name; value = ../../profiles + "/${file}"; })
    (attrNames (readDir ../../profiles)));
  ours = profile: profileFiles.${unsafeDiscardStringContext (toString profile)} or null;
  isThere = profile: ours profile != null || inStore profile;
  # Nothing is read of what an assertion refuses: Nix would stop before it can speak.
  tableOf = profile:
    if !isThere profile then { device = "cuda"; }
    else fromTOML (readFile (if ours profile != null then ours profile else profile));
  # What an instance runs with, as far as Nix has to know it: settings, else the profile, else the schema's default.
  knob = instance: section: key:
    let set = instance.settings.${section}.${key} or null;
    in if set != null then set else ofProfile instance.profile section key;
  ofProfile = profile: section: key:
    (tableOf profile).${section}.${key} or schema.${section}.knobs.${key}.default;
  deviceOf = instance: (tableOf instance.profile).device;

  knobType = { kind, minimum ? null, maximum ? null, choices ? [ ], ... }: {
    bool = types.bool;
    int =
      if maximum != null then types.ints.between minimum maximum
      else if minimum == 0 then types.ints.unsigned
      else types.ints.positive;
    # The schema also refuses the lower end where that is open.
    float = types.numbers.between minimum maximum;
    text = types.str;
    choice = types.enum choices;
    "choice or int" = types.either (types.enum choices) types.ints.positive;
    list = types.listOf types.str;
  }.${kind};
  knobOption = description: mkOption {
    type = types.nullOr (knobType description);
    default = null;
    description = "${description.description} Null keeps the profile's value, or else ${toJSON description.default}.";
  };

  # A misspelled name passes here and is refused, with the nearest one, when the host file is built.
  settingsType = types.submodule {
    freeformType = types.attrsOf types.anything;
    options = mapAttrs
      (_: section: mkOption {
        type = types.submodule {
          freeformType = types.attrsOf types.anything;
          options = mapAttrs (_: knobOption) (lib.filterAttrs (_: known: !(known ? own_option)) section.knobs);
        };
        default = { };
        inherit (section) description;
      })
      schema;
  };

  # Options ------------------------------------------------------------------------------------------------------------
  optionsFor = instance: {
    package = mkOption {
      type = types.package;
      default = if deviceOf instance == "cpu" then packages.serve-cpu else packages.serve-cuda;
      defaultText = lib.literalExpression "pkgs.hyperqwen.serve-cuda # serve-cpu for a profile of that device";
      description = "The server, with its bin/hyperqwen-serve.";
    };
    profile = mkOption {
      type = types.either (types.enum (attrNames profileFiles)) types.path;
      default = "B";
      example = lib.literalExpression "./mine.toml";
      description = "What to serve with: a profile of ours by its name, or a profile file of yours.";
    };
    settings = mkOption {
      type = settingsType;
      default = { };
      example = { limits.context_tokens = 32768; };
      description = "Knobs that this host has different from the profile, by section; docs/profiles.md lists them.";
    };
    host = mkOption {
      type = types.str;
      default = ofProfile instance.profile "server" "host";
      defaultText = lib.literalExpression ''"127.0.0.1"'';
      example = "0.0.0.0";
      description = "Address to listen on. Any but loopback needs apiKeyFile and clients.";
    };
    port = mkOption {
      type = types.port;
      default = ofProfile instance.profile "server" "port";
      defaultText = lib.literalExpression "18020";
      description = "TCP port.";
    };
    openFirewall = mkOption {
      type = types.bool;
      default = false;
      description = "Open the port in the firewall, for all that clients lets through.";
    };
    clients = mkOption {
      type = types.listOf types.str;
      default = [ ];
      example = [ "192.168.0.0/16" ];
      description = "Networks that may reach a server beyond loopback, or any. The service itself drops all others.";
    };
    apiKeyFile = mkOption {
      type = types.nullOr types.path;
      default = null;
      example = "/run/secrets/hyperqwen";
      description = "File with the key that clients must send, outside the store; the service gets it as a credential.";
    };
    modelDir = mkOption {
      type = types.nullOr types.path;
      default = null;
      example = "/var/lib/models";
      description = "Folder of the prepared models (qwen3.8-27b-fast and the like), which the service sees read-only.";
    };
    gpus = mkOption {
      type = types.listOf (types.either types.ints.unsigned (types.strMatching "(GPU|MIG)-[0-9A-Za-z/-]+"));
      default = [ ];
      example = [ 1 ];
      description = "Whole cards, by index or UUID; none given: the first ones, as many as settings.parallel.tensor.";
    };
  };

  instanceModule = { config, ... }: {
    options = optionsFor config // {
      enable = mkOption {
        type = types.bool;
        default = true;
        example = false;
        description = "Whether to run this instance.";
      };
    };
  };

  # Instances ----------------------------------------------------------------------------------------------------------
  # running :: [{ name; at; service; } // options], the default one first
  running = filter (instance: instance.enable) (
    [ (removeAttrs cfg [ "instances" ] // { name = "default"; at = "services.hyperqwen"; service = "hyperqwen"; }) ]
    ++ map
      (name: cfg.instances.${name} // {
        inherit name;
        at = "services.hyperqwen.instances.${name}";
        service = "hyperqwen-${name}";
      })
      (attrNames cfg.instances)
  );

  isLoopback = host: host == "localhost" || host == "::1" || match "127(\\.[0-9]{1,3}){3}" host != null;
  usesCard = instance: deviceOf instance == "cuda";
  cardsOf = instance:
    if !usesCard instance then [ ]
    else if instance.gpus != [ ] then instance.gpus
    else genList (card: card) (knob instance "parallel" "tensor");
  isSlice = card: lib.hasPrefix "MIG-" (toString card);
  inStore = file: isPath file || lib.hasPrefix "${storeDir}/" (toString file);
  unique = list: filter (item: length (filter (other: other == item) list) == 1) list == list;

  # What the host file holds: what is set, the module's own options among it.
  settingsOf = instance:
    let
      set = mapAttrs
        (section: values:
          if schema ? ${section} && isAttrs values
          then lib.filterAttrs (key: value: value != null || !(schema.${section}.knobs ? ${key})) values
          else values)
        instance.settings;
      own = {
        server = { inherit (instance) host port; };
        parallel = lib.optionalAttrs (instance.gpus != [ ]) {
          gpus = concatStringsSep "," (map toString instance.gpus);
        };
      };
      both = set // mapAttrs (section: values: (set.${section} or { }) // values) own;
    in
    lib.filterAttrs (_: values: values != { }) both;

  hostFile = instance: (import ../lib/builder.nix { inherit system; python = packages.hyperqwen; })
    "${instance.service}-host.toml" ../build/run_module.py
    {
      module = "hyperqwen.delivery.host_file";
      arguments = [
        "--profile"
        "${instance.profile}"
        "--where"
        "${instance.at}.settings"
        "--settings"
        (toJSON (settingsOf instance))
      ];
    };

  # Assertions ---------------------------------------------------------------------------------------------------------
  holds = assertion: message: { inherit assertion message; };

  floatsOf = value:
    if isFloat value then [ value ]
    else if isAttrs value then concatMap floatsOf (attrValues value)
    else if isList value then concatMap floatsOf value
    else [ ];

  ownProblems = instance: concatMap
    (section: concatMap
      (key:
        let option = schema.${section}.knobs.${key}.own_option or null;
        in lib.optional (option != null)
          ("${instance.at}.settings.${section}.${key} has an option of its own. "
            + "Fix: set ${instance.at}.${option} instead."))
      (attrNames (if isAttrs instance.settings.${section} then instance.settings.${section} else { })))
    (filter (section: schema ? ${section}) (attrNames instance.settings));

  aboutInstance = instance:
    let
      inherit (instance) at host apiKeyFile modelDir gpus clients;
      tensor = knob instance "parallel" "tensor";
      unusable = file: match "/[A-Za-z0-9._/+@-]*" (toString file) == null;
      keyFix = "Fix: ${at}.apiKeyFile = \"/run/secrets/hyperqwen\";";
      loopback = isLoopback host;
    in
    [
      (holds (system == "x86_64-linux")
        "${at}: hyperqwen is built for x86_64-linux, and this host is ${system}. Fix: ${at}.enable = false;")
      (holds (isThere instance.profile)
        ("${at}.profile is ${toString instance.profile}, which is not there while the host is built. "
          + "Fix: name one of ${concatStringsSep ", " (attrNames profileFiles)}, or a file, unquoted: ./mine.toml."))
      (holds (instance.service == "hyperqwen" || match "[a-z0-9][a-z0-9-]*" instance.name != null)
        "${at}: an instance's name becomes that of a unit and of folders. Fix: use small letters, digits and - alone.")
      (holds (instance.service == "hyperqwen" || !(elem instance.name [ "default" "models" ]))
        "${at}: below /var/lib/hyperqwen, ${instance.name} is taken. Fix: give the instance another name.")
      (holds (instance.port != 0) "${at}.port is 0, which is no port to listen on. Fix: ${at}.port = 18020;")
      (holds (apiKeyFile == null || !inStore apiKeyFile)
        ("${at}.apiKeyFile is ${toString apiKeyFile}, and every user of the host can read what is in the store or "
          + "copied to it. Fix: name a file outside as text, such as ${at}.apiKeyFile = \"/run/secrets/hyperqwen\";"))
      (holds (apiKeyFile == null || inStore apiKeyFile || !unusable apiKeyFile)
        "${at}.apiKeyFile is ${toString apiKeyFile}. Fix: use letters, digits and . _ - + @ / alone.")
      (holds (modelDir == null || !isPath modelDir)
        ("${at}.modelDir is a path, which Nix copies to the store: tens of GB. "
          + "Fix: quote it: ${at}.modelDir = \"${toString modelDir}\";"))
      (holds (modelDir == null || !unusable modelDir)
        "${at}.modelDir is ${toString modelDir}. Fix: use letters, digits and . _ - + @ / alone.")
      (holds
        (!usesCard instance || modelDir != null || knob instance "model" "directory" != ""
          || knob instance "model" "load_format" == "dummy")
        ("${at}.modelDir is not set, and profile ${toString instance.profile} serves a prepared model. "
          + "Fix: ${at}.modelDir = \"/var/lib/models\"; with what 'hyperqwen prepare' wrote in it."))
      (holds (loopback || apiKeyFile != null)
        "${at}.host is ${host}, so that others can reach the server, and there is no key. ${keyFix}")
      (holds (loopback || clients != [ ])
        ("${at}.host is ${host}, and the service lets nobody but this host in. "
          + "Fix: ${at}.clients = [ \"192.168.0.0/16\" ]; or [ \"any\" ]."))
      (holds (!loopback || clients == [ ])
        ("${at}.clients names networks, but ${at}.host is ${host}, which none of them reaches. "
          + "Fix: ${at}.host = \"0.0.0.0\"; or leave clients out."))
      (holds (!instance.openFirewall || apiKeyFile != null)
        "${at}.openFirewall lets others reach the server, and there is no key. ${keyFix}")
      (holds (!instance.openFirewall || !loopback)
        ("${at}.openFirewall opens port ${toString instance.port}, but ${at}.host is ${host}, where nobody outside "
          + "reaches it. Fix: ${at}.host = \"0.0.0.0\"; or ${at}.openFirewall = false;"))
      (holds (unique gpus) "${at}.gpus names a card twice: ${toJSON gpus}. Fix: name each card once.")
      (holds (gpus == [ ] || usesCard instance)
        "${at}.gpus is set, but profile ${toString instance.profile} runs on the CPU. Fix: leave it out.")
      (holds (!(any isSlice gpus))
        ("${at}.gpus names ${concatStringsSep ", " (filter isSlice gpus)}, a MIG instance, and hyperqwen plans for "
          + "whole cards. Fix: turn MIG off on that card, and name its index or the UUID that nvidia-smi -L says."))
      (holds (gpus == [ ] || !usesCard instance || length gpus == tensor)
        ("${at}.gpus names ${toString (length gpus)} cards, and the model is shared by ${toString tensor}. "
          + "Fix: ${at}.settings.parallel.tensor = ${toString (length gpus)};"))
      (holds (all (number: fromJSON (toJSON number) == number) (floatsOf instance.settings))
        "${at}.settings has a number that this Nix writes with six digits. Fix: shorten it to six.")
    ] ++ map (holds false) (ownProblems instance);

  # Each pair of instances once.
  pairs = concatLists (genList
    (n: genList (m: { a = elemAt running m; b = elemAt running n; }) n)
    (length running));
  freePort = port: if any (instance: instance.port == port) running then freePort (port + 1) else port;
  freeCard = card: if any (instance: elem card (cardsOf instance)) running then freeCard (card + 1) else card;
  aboutPair = { a, b }:
    let
      both = filter (card: elem card (cardsOf a)) (cardsOf b);
      indices = instance: all isInt (cardsOf instance);
      cards = instance: cardsOf instance != [ ];
    in
    [
      (holds (a.port != b.port)
        ("${a.at} and ${b.at} both listen on port ${toString a.port}. "
          + "Fix: ${b.at}.port = ${toString (freePort (a.port + 1))};"))
      (holds (both == [ ])
        ("${a.at} and ${b.at} both use card ${concatStringsSep ", " (map toString both)}, and each plans with all "
          + "of it. Fix: "
          + (if indices b then "${b.at}.gpus = [ ${toString (freeCard 0)} ];" else "give ${b.at} other cards.")))
      (holds (!(cards a && cards b) || both != [ ] || indices a == indices b)
        ("${a.at} and ${b.at} name their cards in two ways, so that nothing tells whether they share one. "
          + "Fix: set ${b.at}.gpus the way ${a.at} does: ${if indices a then "by index" else "by UUID"}."))
    ];

  minimumDriver = "580.65.06";
  underWsl = config.wsl.enable or false;
  aboutDriver =
    let
      nvidia = config.hardware.nvidia or { };
      graphics = config.hardware.graphics.enable or config.hardware.opengl.enable or false;
      inUse = nvidia.enabled or (elem "nvidia" (config.services.xserver.videoDrivers or [ ]));
      version = nvidia.package.version or null;
    in
    if underWsl then [
      (holds (config.wsl.useWindowsDriver or true)
        "services.hyperqwen needs the driver of Windows under WSL. Fix: wsl.useWindowsDriver = true;")
    ] else [
      (holds graphics
        ("services.hyperqwen finds the driver's libraries where hardware.graphics links them. "
          + "Fix: hardware.graphics.enable = true;"))
      (holds inUse
        ("services.hyperqwen needs NVIDIA's driver. Fix: services.xserver.videoDrivers = [ \"nvidia\" ]; (no display "
          + "is needed) and hardware.nvidia.open = true; and, the driver being unfree, "
          + "nixpkgs.config.allowUnfreePredicate = "
          + "pkg: builtins.elem (lib.getName pkg) [ \"nvidia-x11\" \"nvidia-settings\" \"nvidia-persistenced\" ];"))
      (holds (!inUse || version == null || compareVersions version minimumDriver >= 0)
        ("services.hyperqwen: hardware.nvidia.package is driver ${toString version}, and CUDA 13.0 needs "
          + "${minimumDriver}. Fix: hardware.nvidia.package = config.boot.kernelPackages.nvidiaPackages.latest;"))
    ];

  # Services -----------------------------------------------------------------------------------------------------------
  serviceFor = instance:
    let
      device = deviceOf instance;
      table = tableOf instance.profile;
      unit = shared.unit.${device};
      beyond = !isLoopback instance.host;
      online = lib.optional beyond "network-online.target";
      folder = "hyperqwen/${instance.name}";
      command = concatStringsSep " " [
        "${instance.package}/bin/hyperqwen-serve"
        "--profile"
        "${instance.profile}"
        # What the engine says is the journal's to keep and to bound.
        "--verbose"
        "--host-file"
        "${hostFile instance}"
      ];
      bound = instance.modelDir != null && toString instance.modelDir != shared.models;
    in
    {
      description = replaceStrings [ "%" ] [ "%%" ] "HyperQwen ${table.name} (${table.title})";
      wantedBy = [ "multi-user.target" ];
      wants = (unit.wants or [ ]) ++ online;
      after = unit.after ++ online;
      unitConfig = unit.unitConfig
        // lib.optionalAttrs (instance.apiKeyFile != null) { AssertPathExists = toString instance.apiKeyFile; }
        // lib.optionalAttrs bound { AssertPathIsDirectory = toString instance.modelDir; };
      environment = {
        HOME = "/var/lib/${folder}";
        HYPERQWEN_CACHE_DIR = "/var/cache/${folder}";
        HYPERQWEN_MODELS = shared.models;
      };
      serviceConfig = shared.service.${device} // {
        ExecStart = command;
        TimeoutStartSec = knob instance "server" "start_seconds" + shared.start_margin_seconds;
        TimeoutStopSec = knob instance "server" "drain_seconds" + shared.stop_margin_seconds;
        StateDirectory = folder;
        CacheDirectory = folder;
        RuntimeDirectory = folder;
        IPAddressAllow = [ "localhost" ] ++ instance.clients;
      }
      # Its failure is ignored: the start finds the same, and only the main process's exit status decides on a restart.
      // lib.optionalAttrs (device == "cuda") {
        ExecStartPre = "-${command} --preflight-only --wait ${toString shared.gpu_wait_seconds}";
      }
      // lib.optionalAttrs bound { BindReadOnlyPaths = "${toString instance.modelDir}:${shared.models}"; }
      // lib.optionalAttrs (instance.apiKeyFile != null) {
        LoadCredential = "${shared.credential}:${toString instance.apiKeyFile}";
      };
    };
in
{
  options.services.hyperqwen = optionsFor cfg // {
    enable = mkEnableOption "the default instance of hyperqwen, which serves Qwen3.8-27B on an NVIDIA card";
    instances = mkOption {
      type = types.attrsOf (types.submodule instanceModule);
      default = { };
      example = lib.literalExpression ''{ batch = { profile = "A"; gpus = [ 1 ]; port = 18021; }; }'';
      description = "More servers, each with the options of services.hyperqwen, on cards and ports of their own.";
    };
  };

  config = mkIf (running != [ ]) {
    assertions = concatMap aboutInstance running ++ concatMap aboutPair pairs
      ++ lib.optionals (any usesCard running) aboutDriver;
    networking.firewall.allowedTCPPorts =
      map (instance: instance.port) (filter (instance: instance.openFirewall) running);
    environment = {
      systemPackages = [ packages.hyperqwen ];
      # What `hyperqwen doctor` and `hyperqwen plan` take for this host.
      etc = mkIf cfg.enable { "hyperqwen/host.toml".source = hostFile (head running); };
    };
    systemd.services = listToAttrs (map
      (instance: { name = instance.service; value = serviceFor instance; })
      running);
  };
}
