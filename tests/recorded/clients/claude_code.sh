# Claude Code, headless: one task in which it runs a command.
export ANTHROPIC_BASE_URL=$BASE_URL ANTHROPIC_MODEL=fake CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
export IS_SANDBOX=1
exec claude -p "What is the weather in Paris?" --output-format stream-json --verbose \
    --dangerously-skip-permissions
