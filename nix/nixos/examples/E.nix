# The longest prompts, on the second card of the host, named so that a reboot cannot exchange it.
{
  services.hyperqwen = {
    enable = true;
    profile = "E";
    modelDir = "/srv/models";
    gpus = [ "GPU-5d1f4a3c-7b0e-4c52-9a64-0f3f0a1b2c3d" ];
    port = 18025;
  };

  hardware.graphics.enable = true;
  hardware.nvidia.open = true;
  services.xserver.videoDrivers = [ "nvidia" ];
}
