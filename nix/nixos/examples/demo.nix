# nano on the CPU: shows that package, module and unit work on a host without a card.
{
  services.hyperqwen = {
    enable = true;
    profile = "demo";
  };
}
