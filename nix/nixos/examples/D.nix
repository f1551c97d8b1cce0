# Long prompts on two cards that share every layer.
{
  services.hyperqwen = {
    enable = true;
    profile = "D";
    modelDir = "/srv/models";
    gpus = [ 0 1 ];
    settings.parallel.tensor = 2;
  };

  hardware.graphics.enable = true;
  hardware.nvidia.open = true;
  services.xserver.videoDrivers = [ "nvidia" ];
}
