package entries

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/testbase"
)

// FuzzBroadcast: a damaged message is refused, or is a valid message.
func FuzzBroadcast(f *testing.F) {
	b := engine.Effects{
		Events:   []engine.Event{{Kind: engine.EventRetried, ID: keys.ID{1}, Queue: "a", Tenant: "t", Attempt: 2, Time: time.UnixMilli(5).UTC(), LastError: "e"}},
		Endings:  []engine.Ending{{ID: keys.ID{2}, Outcome: engine.Outcome{State: engine.Done, Result: []byte("r"), Attempts: 1}}},
		Canceled: []engine.CanceledLease{{Receipt: engine.Receipt{ID: keys.ID{3}, Token: 4}}},
	}
	f.Add(EncodeEffects(&b))
	f.Add([]byte{0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		var n Message
		var err error
		testbase.BoundDecode(t, len(b), func() { n, err = ParseMessage(b) })
		if err != nil {
			require.ErrorIs(t, err, base.ErrCorrupt)
			return
		}
		f := engine.Effects{Events: n.Events, Endings: n.Endings}
		for _, receipt := range n.Canceled {
			f.Canceled = append(f.Canceled, engine.CanceledLease{Receipt: receipt})
		}
		again := EncodeEffects(&f)
		m, err := ParseMessage(again)
		if again != nil {
			require.NoError(t, err)
			require.Equal(t, n, m)
		}
	})
}

// TestBroadcastTravels: events, outcomes and cancels arrive unchanged.
func TestBroadcastTravels(t *testing.T) {
	b := engine.Effects{
		Events:   []engine.Event{{Kind: engine.EventRetried, ID: keys.ID{1}, Queue: "a", Tenant: "t", Attempt: 2, Time: time.UnixMilli(5).UTC(), LastError: "e"}},
		Endings:  []engine.Ending{{ID: keys.ID{2}, Outcome: engine.Outcome{State: engine.Done, Result: []byte("r"), Attempts: 1}}},
		Canceled: []engine.CanceledLease{{Receipt: engine.Receipt{ID: keys.ID{3}, Token: 4}}},
	}
	n, err := ParseMessage(EncodeEffects(&b))
	require.NoError(t, err)
	require.Equal(t, Message{b.Events, b.Endings, []engine.Receipt{b.Canceled[0].Receipt}}, n)
	require.Nil(t, EncodeEffects(new(engine.Effects)), "nothing to tell takes no space")
}
