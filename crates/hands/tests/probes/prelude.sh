# Runs before every shell probe: attempt WHAT COMMAND…: harm is done if COMMAND succeeds.
harms=0
attempt() {
    what=$1
    shift
    if said=$("$@" </dev/null 2>&1); then
        harms=$((harms + 1))
        printf 'HARM: %s: %s\n' "$what" "$said"
    else
        printf 'held: %s: %s\n' "$what" "$(printf %s "$said" | head -c 200 | tr '\n' ' ')"
    fi
}
finish() {
    echo end
    [ "$harms" = 0 ] || exit 66
    exit 0
}
