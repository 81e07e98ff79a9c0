package listing

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/record"
	"codeq/internal/store"
)

// TestIsPart: a part is found where strings.Contains finds it in lower case.
func TestIsPart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		letters := rapid.SampledFrom([]rune("aAbB1é"))
		text := rapid.StringOfN(letters, 0, 12, -1).Draw(t, "text")
		part := rapid.StringOfN(letters, 1, 4, -1).Draw(t, "part")
		lower := []byte(strings.ToLower(part))
		want := strings.Contains(strings.ToLower(text), string(lower))
		require.Equal(t, want, isPart(lower, text))
		require.Equal(t, want, isPart(lower, []byte(text)))
	})
}

// TestFindsMetadata: the metadata of a task is found, that of its lease if there is some.
func TestFindsMetadata(t *testing.T) {
	of := func(value string) *record.Notes { return &record.Notes{Metadata: map[string]string{"at": value}} }
	task := store.Task{Lane: new(store.Lane), Record: record.Record{Notes: of("before")}}
	finds := func(text string) bool {
		found, _ := (&Search{Text: text, Contents: true}).finds(&task)
		return found
	}
	require.True(t, finds("BEFORE"))
	task.Lease = &store.Lease{Notes: of("now")}
	require.True(t, finds("now"))
	require.False(t, finds("before"))
}

// BenchmarkIsPart: the search of a text in a large payload.
func BenchmarkIsPart(b *testing.B) {
	payload := bytes.Repeat([]byte(`{"customer":"somebody else","order":1234567},`), 1<<14)
	b.SetBytes(int64(len(payload)))
	for b.Loop() {
		if isPart([]byte("customers"), payload) {
			b.Fatal("found")
		}
	}
}
