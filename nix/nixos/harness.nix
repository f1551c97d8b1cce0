# What the module uses of nixpkgs' lib, for a box without nixpkgs: same names and meaning (evaluate.nix takes the real
# one where NIXPKGS_LIB names it). Where nixpkgs throws, `evalModules` also returns the texts, so that a check can
# compare them. harness-tests.nix holds it to the semantics it claims.
let
  inherit (builtins)
    all any attrNames concatMap concatStringsSep elem elemAt filter foldl' functionArgs genList head
    intersectAttrs isAttrs isBool isFloat isFunction isInt isList isPath isString length listToAttrs map mapAttrs match
    removeAttrs stringLength substring tail toJSON;

  # Properties of definitions ------------------------------------------------------------------------------------------
  is = type: value: isAttrs value && (value._type or null) == type;
  mkIf = condition: content: { _type = "if"; inherit condition content; };
  mkMerge = contents: { _type = "merge"; inherit contents; };
  mkOverride = priority: content: { _type = "override"; inherit priority content; };
  mkDefault = mkOverride 1000;
  mkForce = mkOverride 50;
  mkOptionDefault = mkOverride 1500;
  ordinary = 100;

  # Attributes behind properties, each property moved down to the values: names stay known without any condition.
  pushDown = value:
    if is "merge" value then concatMap pushDown value.contents
    else if is "if" value then map (mapAttrs (_: mkIf value.condition)) (pushDown value.content)
    else if is "override" value then map (mapAttrs (_: mkOverride value.priority)) (pushDown value.content)
    else [ value ];

  discharge = value:
    if is "merge" value then concatMap discharge value.contents
    else if is "if" value then if value.condition then discharge value.content else [ ]
    else [ value ];

  # definitions :: [{ file; value; }] -> those that count, without their properties
  definitions = defs:
    let
      split = concatMap
        (def: map
          (value:
            if is "override" value then { inherit (def) file; inherit (value) priority; value = value.content; }
            else { inherit (def) file; inherit value; priority = ordinary; })
          (discharge def.value))
        defs;
      strongest = foldl' (best: def: if def.priority < best then def.priority else best) 9999 split;
    in
    filter (def: def.priority == strongest) split;

  # Texts --------------------------------------------------------------------------------------------------------------
  show = value:
    if isFunction value then "a function"
    else if isPath value then toString value
    else if isAttrs value && value ? outPath then "a derivation"
    else toJSON value;
  at = concatStringsSep ".";
  # "is {"a":1} in FILE": what was given, and where.
  given = defs: concatStringsSep " and " (map (def: "${show def.value} in ${def.file}") defs);

  # Types --------------------------------------------------------------------------------------------------------------
  # merge :: path -> [definition that passed the check] -> { value; problems; }
  one = path: defs:
    let different = filter (def: def.value != (head defs).value) (tail defs);
    in {
      inherit (head defs) value;
      problems = if different == [ ] then [ ] else [ "The option `${at path}' has two values: ${given defs}." ];
    };
  type = description: check: { inherit description check; merge = one; };

  number = value: isInt value || isFloat value;
  between = low: high: value: low <= value && value <= high;
  quoted = concatStringsSep ", ";

  # checked :: path -> type -> [definition] -> { defined; value; problems; }
  checked = path: kind: defs:
    let
      counted = definitions defs;
      wrong = filter (def: !kind.check def.value) counted;
      merged = kind.merge path counted;
      problems =
        if counted == [ ] then [ ]
        else if wrong != [ ] then [ "The option `${at path}' is ${given wrong}; it has to be ${kind.description}." ]
        else merged.problems;
    in
    {
      inherit problems;
      defined = counted != [ ];
      value =
        if counted == [ ] then throw "The option `${at path}' is used, but has no value."
        else if problems != [ ] then throw (concatStringsSep "\n" problems)
        else merged.value;
    };

  # every :: { name = { defined; value; problems; } } -> the same as one
  every = results:
    let present = filter (name: results.${name}.defined) (attrNames results);
    in {
      value = listToAttrs (map (name: { inherit name; inherit (results.${name}) value; }) present);
      problems = concatMap (name: results.${name}.problems) (attrNames results);
    };

  namesOf = defs: attrNames (foldl' (names: def: names // def.value) { } defs);
  # below :: name -> [definition of attributes] -> definitions of that attribute
  below = name: concatMap (def: if def.value ? ${name} then [ (def // { value = def.value.${name}; }) ] else [ ]);
  pushedDown = concatMap (def: map (value: { inherit (def) file; inherit value; }) (pushDown def.value));

  types = rec {
    bool = type "true or false" isBool;
    int = type "a whole number" isInt;
    float = type "a number with a fraction" isFloat;
    number = type "a number" (value: isInt value || isFloat value);
    str = type "text" isString;
    path = type "an absolute path"
      (value: isPath value || (isString value || isAttrs value && value ? outPath)
        && substring 0 1 (toString value) == "/");
    package = type "a package" (value: isAttrs value && value ? outPath);
    port = ints.between 0 65535;
    strMatching = pattern: type "text that matches ${pattern}" (value: isString value && match pattern value != null);
    enum = values: type "one of ${quoted (map show values)}" (value: elem value values);
    ints = {
      between = low: high: type "a whole number from ${toString low} to ${toString high}"
        (value: isInt value && between low high value);
      unsigned = type "a whole number from 0" (value: isInt value && value >= 0);
      positive = type "a whole number from 1" (value: isInt value && value >= 1);
    };
    numbers.between = low: high: type "a number from ${toString low} to ${toString high}"
      (value: number.check value && between low high value);

    nullOr = inner: {
      description = "null or ${inner.description}";
      check = value: value == null || inner.check value;
      merge = path: defs: (if any (def: def.value == null) defs then one else inner.merge) path defs;
    };
    either = a: b: {
      description = "${a.description} or ${b.description}";
      check = value: a.check value || b.check value;
      merge = path: defs: (if all (def: a.check def.value) defs then a else b).merge path defs;
    };
    listOf = inner: {
      description = "a list, each ${inner.description}";
      check = isList;
      merge = path: defs:
        let
          items = concatMap (def: map (value: { inherit (def) file; inherit value; }) def.value) defs;
          results = genList (n: checked (path ++ [ "[${toString n}]" ]) inner [ (elemAt items n) ]) (length items);
        in
        { value = map (result: result.value) results; problems = concatMap (result: result.problems) results; };
    };
    attrsOf = inner: {
      description = "attributes, each ${inner.description}";
      element = inner;
      check = isAttrs;
      merge = path: defs:
        let pushed = pushedDown defs;
        in every (listToAttrs (map
          (name: { inherit name; value = checked (path ++ [ name ]) inner (below name pushed); })
          (namesOf pushed)));
    };
    anything = {
      description = "anything";
      check = _: true;
      merge = path: defs:
        if all (def: isAttrs def.value && !(def.value ? outPath)) defs then (attrsOf anything).merge path defs
        else one path defs;
    };
    submodule = module: {
      description = "a set of options";
      check = value: isAttrs value || isFunction value;
      merge = path: defs:
        let
          result = evaluate {
            prefix = path;
            modules = [ module ] ++ map (def: { _file = def.file; config = def.value; }) defs;
            specialArgs = { name = elemAt path (length path - 1); };
          };
        in
        { value = result.config; inherit (result) problems; };
    };
  };

  # Options and modules ------------------------------------------------------------------------------------------------
  mkOption =
    { type ? types.anything, default ? null, defaultText ? null, example ? null, description ? null, apply ? null
    , internal ? false, visible ? true, readOnly ? false
    }@option: { inherit type; } // option // { _type = "option"; };
  mkEnableOption = what: mkOption {
    type = types.bool;
    default = false;
    example = true;
    description = "Whether to enable ${what}.";
  };

  # normal :: args -> file -> module -> [{ file; options; config; freeform; }], imports first
  normal = args: file: module:
    if isPath module || isString module then normal args (toString module) (import module)
    else if isFunction module then normal args file (module (intersectAttrs (functionArgs module) args))
    else
      let
        here = module._file or file;
        long = module ? options || module ? config;
        rest = removeAttrs module [ "_file" "imports" "freeformType" "key" ];
        unknown = removeAttrs rest [ "options" "config" "meta" ];
      in
      concatMap (normal args here) (module.imports or [ ]) ++ [
        {
          file = here;
          options = module.options or { };
          config =
            if !long then rest
            else if unknown == { } then module.config or { }
            else throw "${here}: ${quoted (attrNames unknown)} stands beside options or config; move it into config";
          freeform = module.freeformType or null;
        }
      ];

  joined = prefix: a: b: a // mapAttrs
    (name: value:
      if !(a ? ${name}) then value
      else if is "option" value || is "option" a.${name} then
        throw "The option `${at (prefix ++ [ name ])}' is declared twice."
      else joined (prefix ++ [ name ]) a.${name} value)
    b;

  tree = prefix: options: freeform: defs:
    let
      pushed = pushedDown defs;
      declared = mapAttrs
        (name: option:
          let
            path = prefix ++ [ name ];
            own = below name pushed;
            default =
              if !(option ? default) then [ ]
              else [ { file = "its default"; value = mkOptionDefault option.default; } ];
            result = checked path option.type (own ++ default);
          in
          if !is "option" option then { defined = true; } // tree path option null own
          else if option ? apply then result // { defined = true; value = option.apply result.value; }
          else result // { defined = true; })
        options;
      unknown = filter (name: !(options ? ${name})) (namesOf pushed);
      free = every (listToAttrs (map
        (name: { inherit name; value = checked (prefix ++ [ name ]) freeform.inner (below name pushed); })
        unknown));
      known = every declared;
      stray = map
        (name: "The option `${at (prefix ++ [ name ])}' does not exist (${given (below name pushed)}).")
        unknown;
    in
    { parts = declared; } // (
      if freeform != null then {
        value = free.value // known.value;
        problems = known.problems ++ free.problems;
        stray = [ ];
      } else {
        inherit (known) value;
        problems = known.problems ++ stray;
        stray = stray ++ concatMap (name: declared.${name}.stray or [ ]) (attrNames options);
      }
    );

  evaluate = { modules, specialArgs ? { }, prefix ? [ ] }:
    let
      args = specialArgs // { inherit lib config options; };
      parts = concatMap (normal args "a module") modules;
      options = foldl' (joined prefix) { } (map (part: part.options) parts);
      freeforms = filter (kind: kind != null) (map (part: part.freeform) parts);
      freeform = if freeforms == [ ] then null else { inner = (head freeforms).element; };
      result = tree prefix options freeform (map (part: { inherit (part) file; value = part.config; }) parts);
      config = result.value;
    in
    {
      inherit options;
      # parts.NAME.problems are those of one option, or of those below it.
      inherit (result) problems parts;
      config = if result.stray == [ ] then config else throw (concatStringsSep "\n" result.stray);
    };

  hasPrefix = prefix: text: substring 0 (stringLength prefix) text == prefix;
  lib = {
    inherit hasPrefix mkDefault mkEnableOption mkForce mkIf mkMerge mkOption types;
    evalModules = evaluate;
    literalExpression = text: { _type = "literalExpression"; inherit text; };
    optional = condition: value: if condition then [ value ] else [ ];
    optionals = condition: values: if condition then values else [ ];
    optionalAttrs = condition: values: if condition then values else { };
    filterAttrs = keep: set: removeAttrs set (filter (name: !keep name set.${name}) (attrNames set));
  };
in
lib
