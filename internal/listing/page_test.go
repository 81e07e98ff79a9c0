package listing

import (
	"encoding/base64"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/keys"
)

// TestPageIsGivenUp: a shard may go on reading after its caller has gone. Only the race detector
// can see a fault there.
func TestPageIsGivenUp(t *testing.T) {
	q := &Request{Query: Query{Queue: "q"}, States: []engine.TaskState{engine.Ready}, Limit: 1}
	gone, read := errors.New("the caller has gone"), make(chan struct{})
	fetch := func(_ int, l *Reader[listed]) error {
		go func() {
			defer close(read)
			l.Records, l.ReadBytes = 1, 1
		}()
		return gone
	}
	_, err := ReadPage(q, Place{}, newReader, 1, func(l *listed) Key { return l.Key }, fetch)
	require.ErrorIs(t, err, gone)
	<-read
}

// FuzzPlace: a text is refused, or is the only text of a place in the list. This is also true of
// texts with a right checksum.
func FuzzPlace(f *testing.F) {
	q := &Request{Query: Query{Queue: "q", Tenants: []string{"t"}}, States: []engine.TaskState{engine.Ready, engine.Dead}}
	for _, p := range []*Place{
		{State: 1}, {After: &Position{Key: Key{Queue: "a", Tenant: "\xff", Priority: 9, ID: keys.ID{1}}, At: math.MaxUint64}},
		{After: &Position{Key: Key{Queue: "a"}, End: true}},
	} {
		text := q.Text(p)
		got, ok := q.Parse(text)
		require.True(f, ok)
		require.Equal(f, p, &got)
		f.Add(text)
	}
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		check := func(text string) {
			p, ok := q.Parse(text)
			if !ok {
				return
			}
			require.Less(t, p.State, len(q.States))
			if text != "" {
				require.Equal(t, text, q.Text(&p))
			}
		}
		check(text)
		body := []byte(text)
		if b, err := base64.RawURLEncoding.DecodeString(text); err == nil && len(b) > placeSum {
			body = b[:len(b)-placeSum]
		}
		check(base64.RawURLEncoding.EncodeToString(append(body, q.placeSum(body)...)))
	})
}
