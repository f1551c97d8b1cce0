# The semantics of nixpkgs' module system that the harness claims: [{ name; got; want; }]. Only what both give as a
# value is here, so that the same tests hold the real lib to them (evaluate.nix).
{ lib }:
let
  inherit (lib) mkDefault mkForce mkIf mkMerge mkOption types;

  # value of option x, of this type, under these definitions
  valueOf = type: modules: (lib.evalModules {
    modules = [ { options.x = mkOption { inherit type; }; } ] ++ modules;
  }).config.x;
  fails = value: !(builtins.tryEval (builtins.deepSeq value null)).success;
  test = name: got: want: { inherit name got want; };
  accepts = name: type: value: test "${name} accepts" (valueOf type [ { x = value; } ]) value;
  refuses = name: type: value: test "${name} refuses" (fails (valueOf type [ { x = value; } ])) true;

  section = types.submodule {
    freeformType = types.attrsOf types.anything;
    options.known = mkOption { type = types.nullOr types.int; default = null; };
  };
  named = types.attrsOf (types.submodule ({ name, config, ... }: {
    options.own = mkOption { type = types.str; default = name; };
    options.copy = mkOption { type = types.str; default = config.own; };
  }));
  declared = module: (lib.evalModules { modules = [ { options.x = mkOption { default = 1; }; } module ]; }).config.x;
in
[
  (accepts "bool" types.bool false)
  (refuses "bool" types.bool "false")
  (accepts "int" types.int (-3))
  (refuses "int" types.int 1.5)
  (accepts "str" types.str "")
  (refuses "str" types.str 1)
  (accepts "port" types.port 65535)
  (refuses "port" types.port 65536)
  (refuses "port" types.port (-1))
  (accepts "ints.between" (types.ints.between 2 4) 4)
  (refuses "ints.between" (types.ints.between 2 4) 5)
  (accepts "ints.unsigned" types.ints.unsigned 0)
  (refuses "ints.positive" types.ints.positive 0)
  (accepts "numbers.between of a whole number" (types.numbers.between 0 2) 1)
  (accepts "numbers.between" (types.numbers.between 0 2) 0.5)
  (refuses "numbers.between" (types.numbers.between 0 2) 2.5)
  (refuses "numbers.between of text" (types.numbers.between 0 2) "1")
  (accepts "enum" (types.enum [ "a" "b" ]) "b")
  (refuses "enum" (types.enum [ "a" "b" ]) "c")
  (accepts "nullOr null" (types.nullOr types.int) null)
  (accepts "nullOr" (types.nullOr types.int) 1)
  (refuses "nullOr" (types.nullOr types.int) "1")
  (accepts "either, the first" (types.either types.int types.str) 1)
  (accepts "either, the second" (types.either types.int types.str) "1")
  (refuses "either" (types.either types.int types.str) true)
  (accepts "path as text" types.path "/etc")
  (accepts "path" types.path ./.)
  (refuses "path that is relative" types.path "etc")
  (accepts "strMatching" (types.strMatching "a+") "aa")
  (refuses "strMatching" (types.strMatching "a+") "ab")
  (refuses "package" types.package { })
  (refuses "listOf" (types.listOf types.int) [ 1 "2" ])
  (refuses "attrsOf" (types.attrsOf types.int) { a = 1; b = "2"; })

  (test "an option without a value fails when it is used" (fails (valueOf types.int [ ])) true)
  (test "equal values agree" (valueOf types.int [ { x = 1; } { x = 1; } ]) 1)
  (test "different values fail" (fails (valueOf types.int [ { x = 1; } { x = 2; } ])) true)
  (test "lists are joined" (valueOf (types.listOf types.int) [ (mkMerge [ { x = [ 1 ]; } { x = [ 2 ]; } ]) ]) [ 1 2 ])
  (test "attributes are joined" (valueOf (types.attrsOf types.int) [ { x.a = 1; } { x.b = 2; } ]) { a = 1; b = 2; })
  (test "mkDefault gives way" (valueOf types.int [ { x = 1; } { x = mkDefault 2; } ]) 1)
  (test "mkForce wins" (valueOf types.int [ { x = 1; } { x = mkForce 2; } ]) 2)
  (test "mkForce replaces a list" (valueOf (types.listOf types.int) [ { x = [ 1 ]; } { x = mkForce [ ]; } ]) [ ])
  (test "mkIf false is no definition" (valueOf types.int [ { x = 1; } { x = mkIf false 2; } ]) 1)
  (test "mkIf above the option" (valueOf types.int [ (mkIf true { x = 2; }) (mkIf false { x = 3; }) ]) 2)
  (test "mkIf drops an attribute" (valueOf (types.attrsOf types.int) [ { x.a = mkIf false 1; x.b = 2; } ]) { b = 2; })
  (test "mkMerge inside mkIf" (valueOf types.int [ (mkIf true (mkMerge [ { x = mkDefault 1; } { x = 2; } ])) ]) 2)
  (test "a condition may ask for another option"
    (declared ({ config, ... }: { options.y = mkOption { default = true; }; config.x = mkIf config.y 5; }))
    5)
  (test "a default gives way to mkDefault" (declared { x = mkDefault 2; }) 2)
  (test "an unknown option fails" (fails (declared { z = 1; })) true)
  (test "imports count" (declared { imports = [ { x = 4; } ]; }) 4)

  (test "a free key stays beside a known one" (valueOf section [ { x.known = 1; } { x.free = { a = [ 2 ]; }; } ])
    { known = 1; free.a = [ 2 ]; })
  (test "a known key keeps its type" (fails (valueOf section [ { x.known = "1"; } ])) true)
  (test "a submodule knows its name and itself" (valueOf named [ { x.a = { }; } { x.b.own = "c"; } ])
    { a = { own = "a"; copy = "a"; }; b = { own = "c"; copy = "c"; }; })
  (test "mkDefault inside a submodule" (valueOf named [ { x.a.own = mkDefault "d"; } ])
    { a = { own = "d"; copy = "d"; }; })
]
