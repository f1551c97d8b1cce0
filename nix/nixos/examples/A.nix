# An API backend for the machines of one network: many requests at a time, a key, the port open.
{
  services.hyperqwen = {
    enable = true;
    profile = "A";
    modelDir = "/srv/models";
    host = "0.0.0.0";
    clients = [ "192.168.20.0/24" ];
    openFirewall = true;
    apiKeyFile = "/run/secrets/hyperqwen";
    settings.limits.concurrent_requests = 32;
  };

  hardware.graphics.enable = true;
  hardware.nvidia.open = true;
  services.xserver.videoDrivers = [ "nvidia" ];
}
