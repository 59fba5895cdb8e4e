# `llm`: a prompt, a conversation, a tool, a schema, embeddings.
set -e
export LLM_USER_PATH=$HOME/llm
mkdir -p "$LLM_USER_PATH"
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<END
- model_id: fake
  model_name: fake
  api_base: "$BASE_URL/v1"
  api_key_name: openai
  supports_tools: true
  supports_schema: true
- model_id: fake-completions
  model_name: fake
  api_base: "$BASE_URL/v1"
  completion: true
END
llm -m fake "What is the weather in Paris?" -s "Be brief."
llm -m fake --no-stream -c "And in Rome?" -o temperature 0.5 -o max_tokens 50
llm -m fake "What version?" --tool llm_version
llm -m fake "A city?" --schema "name, people int"
llm -m fake-completions "Once" -o max_tokens 8
