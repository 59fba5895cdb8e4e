# aider: one message about a file.
set -e
echo "x = 1" > a.py
exec aider a.py --message "Set x to 2." --yes --no-git --model openai/fake \
    --openai-api-base "$BASE_URL/v1" --no-check-update --no-analytics --no-show-release-notes \
    --no-show-model-warnings
