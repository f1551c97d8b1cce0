{
  description = "hyperqwen: a pinned, patched vLLM that serves Qwen3.8-27B on one GPU, built without flake inputs";

  outputs = { self }: import ./nix { inherit self; };
}
