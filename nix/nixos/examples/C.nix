# Edits and copies of long files: shorter answers to queue, more time to finish them at a stop.
{
  services.hyperqwen = {
    enable = true;
    profile = "C";
    modelDir = "/srv/models";
    settings = {
      limits = {
        context_tokens = 49152;
        concurrent_requests = 2;
      };
      server.drain_seconds = 120;
    };
  };

  hardware.graphics.enable = true;
  hardware.nvidia.open = true;
  services.xserver.videoDrivers = [ "nvidia" ];
}
