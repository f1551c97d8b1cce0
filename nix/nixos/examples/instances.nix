# Two servers on two cards, and the demo beside them.
{ lib, ... }:
{
  services.hyperqwen = {
    instances = {
      chat = {
        modelDir = "/srv/models";
        gpus = [ 0 ];
      };
      batch = {
        profile = "A";
        modelDir = "/srv/models";
        gpus = [ 1 ];
        port = 18021;
        apiKeyFile = "/run/secrets/hyperqwen-batch";
      };
      trial = {
        profile = ../../../profiles/demo.toml;
        port = 18022;
        settings.limits.concurrent_requests = lib.mkDefault 2;
      };
    };
  };

  hardware.graphics.enable = true;
  hardware.nvidia.open = true;
  services.xserver.videoDrivers = lib.mkForce [ "nvidia" ];
}
