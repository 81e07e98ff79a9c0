package wire

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// named is a value with strings wherever one can be.
type named struct {
	inner
	Name    string `json:",omitempty"`
	Pointer *string
	List    []string
	Pair    [2]string
	Map     map[string]string
	Deep    map[string][]*inner
	Any     any
	Bytes   []byte
	Time    time.Time
}

type inner struct{ Inner string }

func namedAs(s string) *named {
	return &named{
		inner: inner{s}, Name: s, Pointer: &s, List: []string{s, "", s}, Pair: [2]string{1: s}, Map: map[string]string{s: s, "a": "b"},
		Deep: map[string][]*inner{s: {{s}, nil}}, Any: s, Bytes: []byte(s), Time: time.Unix(1, 2).UTC(),
	}
}

// hostileStrings are not UTF-8, or use the characters that stand for bytes.
var hostileStrings = []string{
	"", "a", "\xff", "a\x00\xffb", "\xf4\x8f", "\xf4\x8f\xbc\x80", "\U0010ff41", "\U0010f000\xfe", "\U0010ffff\U0010ffff", "\ufffd", "\xed\xa0\x80",
	strings.Repeat("\xc3\xa9\xa9", 9), "<a>&\u2028",
}

func TestJSON(t *testing.T) {
	for _, s := range hostileStrings {
		v := namedAs(s)
		b, err := MarshalJSON(v)
		require.NoError(t, err)
		require.True(t, utf8.Valid(b))
		require.Equal(t, namedAs(s), v, "it is not changed")
		var got named
		require.NoError(t, UnmarshalJSON(b, &got), "%q", s)
		require.Equal(t, v, &got)
		if utf8.ValidString(s) && !strings.Contains(s, neighbors) {
			plain, err := json.Marshal(v)
			require.NoError(t, err)
			require.Equal(t, string(plain), string(b))
		}

		r := NewReader(AppendJSON([]byte{7}, []string{s}))
		require.Equal(t, uint64(7), r.Uint())
		var list []string
		r.JSON(r.Rest(), &list)
		require.NoError(t, r.Done())
		require.Equal(t, []string{s}, list)
	}
	require.NoError(t, UnmarshalJSON([]byte("null"), new(*named)))
	b, err := MarshalJSON(nil)
	require.NoError(t, err)
	require.Equal(t, "null", string(b))
	require.Error(t, UnmarshalJSON([]byte("{"), new(named)))
	r := NewReader(nil)
	r.JSON([]byte("{"), new(named))
	require.ErrorIs(t, r.Done(), ErrMalformed)
	_, err = MarshalJSON(func() {})
	require.Error(t, err)
	b, err = MarshalJSON(`\ufffd`)
	require.NoError(t, err)
	require.Equal(t, `"\\ufffd"`, string(b))
}

// TestTextsAreApart: no two strings are written as the same one.
func TestTextsAreApart(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	parts := []string{"a", "é", "\U0010ffff", "\U0010f123", "\xf4", "\x8f", "\xbf", "\xc3", "\U0010ff8f"}
	for range 20_000 {
		var s string
		for range rng.IntN(6) {
			s += parts[rng.IntN(len(parts))]
		}
		text := toText(s)
		require.True(t, utf8.ValidString(text), "seed %d: %q", seed, s)
		require.Equal(t, s, fromText(text), "seed %d", seed)
	}
}

func FuzzJSON(f *testing.F) {
	for _, s := range hostileStrings {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		b, err := MarshalJSON(namedAs(s))
		require.NoError(t, err)
		var got named
		require.NoError(t, UnmarshalJSON(b, &got))
		require.Equal(t, namedAs(s), &got)
	})
}
