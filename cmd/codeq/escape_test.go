package main

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func TestSafe(t *testing.T) {
	for in, want := range map[string]string{
		"":                       "",
		"plain, ümläut, 日本語, 🙂":  "plain, ümläut, 日本語, 🙂",
		"\x1b[31m":               `\x1b[31m`,
		"a\tb\r\n":               `a\tb\r\n`,
		"\x00\x7f\u009b":         `\x00\x7f\u009b`,
		"\u202e\u2066\ufeff":     `\u202e\u2066\ufeff`,
		"\u2028\u00a0\U000e0041": `\u2028\u00a0\U000e0041`,
		"\xff\xc3":               `\xff\xc3`,
	} {
		require.Equal(t, want, safe(in))
		require.Equal(t, want, safe(safe(in)), "twice")
	}
	require.Equal(t, "a\n"+`b\x1b`+"\n", safeLines("a\nb\x1b\n"))
}

// FuzzSafe: only printable characters are left, and JSON keeps its meaning.
func FuzzSafe(f *testing.F) {
	for _, s := range []string{hostileBytes, "\u0085", "<script>", strings.Repeat("\u0301", 9), "\U000f0000", `\u001b`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, r := range safe(s) {
			require.True(t, unicode.IsPrint(r))
		}
		if utf8.ValidString(s) && isSafe(s) {
			require.Equal(t, s, safe(s))
		}
		b, err := json.Marshal(map[string]string{s: s})
		require.NoError(t, err)
		var before, after map[string]string
		require.NoError(t, json.Unmarshal(b, &before))
		out := safeJSON(b)
		require.True(t, isSafe(string(out)), "%q", out)
		require.NoError(t, json.Unmarshal(out, &after))
		require.Equal(t, before, after)
	})
}
