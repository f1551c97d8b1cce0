# pkgs.hyperqwen is the command line; pkgs.hyperqwen.serve-cuda and the like are the other packages.
final: prev:
let
  inherit (import ../. {
    inherit (prev.stdenv.hostPlatform) system;
    fetchers = import ./fetchers.nix { pkgs = prev; };
  }) packages;
  built = packages.${prev.stdenv.hostPlatform.system};
in
{
  hyperqwen = built // built.hyperqwen;
}
