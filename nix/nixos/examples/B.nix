# One user on this machine: the least that a host has to say.
{
  services.hyperqwen = {
    enable = true;
    modelDir = "/var/lib/hyperqwen/models";
  };

  hardware.graphics.enable = true;
  services.xserver.videoDrivers = [ "nvidia" ];
}
