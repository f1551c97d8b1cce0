{
  description = "hyperqwen: a pinned, patched vLLM that serves Qwen3.8-27B on one GPU, built without flake inputs";

  outputs = _: import ./nix { };
}
