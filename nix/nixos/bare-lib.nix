# The harness as nixpkgs' lib shows itself: `evalModules` gives values and options, no texts of what is wrong, and joins
# what several modules define from the last to the first. What tests.nix says of the real lib is held against this one.
let
  harness = import ./harness.nix;
  reversed = list: builtins.foldl' (done: item: [ item ] ++ done) [ ] list;
in
harness // {
  evalModules = { modules, ... }@arguments:
    let result = harness.evalModules (arguments // { modules = reversed modules; });
    in { inherit (result) config options; };
}
