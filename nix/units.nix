# One systemd unit a profile: unit-A … unit-demo. The check `units` holds them against systemd's own tools.
{ buildWith
, hyperqwen # the tools' environment
, programs # { cuda; cpu; }: what serves, as a path of a program
}:
let
  inherit (builtins) attrNames filter fromTOML listToAttrs map match readDir readFile;

  files = filter (file: match ".*[.]toml" file != null) (attrNames (readDir ../profiles));
  unit = file:
    let profile = fromTOML (readFile (../profiles + "/${file}"));
    in {
      name = "unit-${profile.name}";
      value = buildWith hyperqwen "unit-${profile.name}" ./build/run_module.py {
        module = "hyperqwen.delivery.unit";
        arguments = [ "--profile" "${../profiles + "/${file}"}" "--program" programs.${profile.device} ];
      };
    };
in
listToAttrs (map unit files)
