# The module with a host's configuration, evaluated without NixOS: by nixpkgs' lib where NIXPKGS_LIB names its folder,
# else by the harness. Pure evaluation knows no variables; with nixpkgs at hand:
#   NIXPKGS_LIB=$(nix eval --raw nixpkgs#path)/lib nix eval --impure .#lib.nixosFailures
{ pkgs
, nixpkgsLib ? builtins.getEnv "NIXPKGS_LIB"
}:
let
  lib = import (if nixpkgsLib == "" then ./harness.nix else /. + nixpkgsLib);
in
{
  inherit lib;
  # evaluate :: configuration -> { config; options; problems; … }, where only the harness knows problems
  evaluate = configuration: { problems = [ ]; } // lib.evalModules {
    modules = [ ./host.nix ./module.nix configuration ];
    specialArgs = { inherit pkgs; };
  };
}
