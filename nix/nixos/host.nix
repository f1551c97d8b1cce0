# The options of NixOS that the module reads and sets, for an evaluation without NixOS. Their types are NixOS's; what a
# host does with them is not here, but for the assertion of nixpkgs' NVIDIA module, which every host has to meet.
{ config, lib, ... }:
let
  inherit (lib) mkOption types;
  option = type: default: mkOption { inherit type default; };
  text = types.either types.bool (types.either types.int types.str);
  section = option (types.attrsOf (types.either text (types.listOf text))) { };

  service.options = {
    description = option types.str "";
    wantedBy = option (types.listOf types.str) [ ];
    wants = option (types.listOf types.str) [ ];
    after = option (types.listOf types.str) [ ];
    environment = option (types.attrsOf text) { };
    unitConfig = section;
    serviceConfig = section;
  };
  file.options.source = mkOption { type = types.path; };
in
{
  options = {
    assertions = option (types.listOf types.anything) [ ];
    systemd.services = option (types.attrsOf (types.submodule service)) { };
    networking.firewall.allowedTCPPorts = option (types.listOf types.port) [ ];
    environment.systemPackages = option (types.listOf types.package) [ ];
    environment.etc = option (types.attrsOf (types.submodule file)) { };
    hardware.graphics.enable = option types.bool false;
    hardware.nvidia.package = option types.anything { version = "595.45.04"; };
    hardware.nvidia.open = option (types.nullOr types.bool) null;
    services.xserver.videoDrivers = option (types.listOf types.str) [ "modesetting" "fbdev" ];
    wsl.enable = option types.bool false;
    wsl.useWindowsDriver = option types.bool false;
  };

  # From driver 560 on, NixOS takes neither kernel module for granted.
  config.assertions = lib.optional (builtins.elem "nvidia" config.services.xserver.videoDrivers) {
    assertion = config.hardware.nvidia.open != null
      || builtins.compareVersions config.hardware.nvidia.package.version "560" < 0;
    message = "hardware.nvidia.open has to be set for driver 560 or newer.";
  };
}
