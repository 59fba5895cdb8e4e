# codex, headless: one task in which it runs a command.
mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" <<END
model = "fake"
model_provider = "manta"
[model_providers.manta]
name = "manta"
base_url = "$BASE_URL/v1"
wire_api = "responses"
END
exec codex exec --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
    "What is the weather in Paris?"
