# promptfoo: one evaluation by chats, completions, responses and Anthropic's messages.
set -e
export PROMPTFOO_DISABLE_TELEMETRY=1 PROMPTFOO_DISABLE_UPDATE=1 PROMPTFOO_CONFIG_DIR=$HOME/promptfoo
export PROMPTFOO_DISABLE_REMOTE_GENERATION=true
cat > promptfooconfig.yaml <<END
prompts: ["What is the weather in {{city}}?"]
providers:
  - id: openai:chat:fake
    config: {apiBaseUrl: "$BASE_URL/v1", max_tokens: 50}
  - id: openai:completion:fake
    config: {apiBaseUrl: "$BASE_URL/v1", max_tokens: 50}
  - id: openai:responses:fake
    config: {apiBaseUrl: "$BASE_URL/v1"}
  - id: anthropic:messages:fake
    config: {apiBaseUrl: "$BASE_URL"}
tests:
  - vars: {city: Paris}
    assert: [{type: contains, value: Paris}]
END
exec promptfoo eval --no-cache --no-progress-bar --no-table -o out.json
