# One user on this machine: the least that a host has to say.
{
  services.hyperqwen = {
    enable = true;
    modelDir = "/var/lib/hyperqwen/models";
  };

  hardware.graphics.enable = true;
  hardware.nvidia.open = true;
  services.xserver.videoDrivers = [ "nvidia" ];
}
