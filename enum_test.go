package codeq_test

import (
	texts "encoding"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// enumValue is what a pointer to a value of an enum can do.
type enumValue[T any] interface {
	*T
	fmt.Stringer
	texts.TextMarshaler
	texts.TextUnmarshaler
}

// testEnum takes the texts of the values from first on.
func testEnum[T ~uint8, P enumValue[T]](t *testing.T, first T, names ...string) {
	t.Run(fmt.Sprintf("%T", first), func(t *testing.T) {
		values := make(map[T]bool)
		for i, text := range names {
			v := first + T(i)
			values[v] = true
			require.Equal(t, text, P(&v).String())
			b, err := P(&v).MarshalText()
			require.NoError(t, err)
			require.Equal(t, text, string(b))
			var back T
			require.NoError(t, P(&back).UnmarshalText(b))
			require.Equal(t, v, back)
		}
		for n := range 256 {
			v := T(n)
			if values[v] {
				continue
			}
			require.Regexp(t, fmt.Sprintf(`^\w+\(%d\)$`, n), P(&v).String())
			_, err := P(&v).MarshalText()
			require.ErrorIs(t, err, codeq.ErrInvalid)
		}
		for _, text := range []string{"", "other", names[0] + " ", "Ready", "State(1)", "0"} {
			v := first
			require.ErrorIs(t, P(&v).UnmarshalText([]byte(text)), codeq.ErrInvalid, "%q", text)
			require.Equal(t, first, v, "an error changes nothing")
		}
	})
}

// TestEnums: each value is a text that is read back, and nothing else is a value.
func TestEnums(t *testing.T) {
	testEnum(t, codeq.Ready, "ready", "scheduled", "blocked", "leased", "dead", "done", "canceled")
	testEnum(t, codeq.BulkCancel, "cancel", "redrive", "purge", "set-priority", "move")
	testEnum(t, codeq.HoldOnDead, "hold", "cancel", "run")
	testEnum(t, codeq.RunOnMissing, "run", "cancel", "refuse")
	testEnum(t, codeq.MissedOnce, "once", "skip", "all")
	testEnum(t, codeq.DurabilityDefault, "default", "process", "disk", "none")
	testEnum(t, codeq.EventProduced,
		"produced", "claimed", "completed", "retried", "released", "dead", "canceled", "expired", "progress")

	testEnum(t, codeq.VerdictCompleted,
		"completed", "retry", "retry-after", "released", "dead-letter", "canceled", "lease-lost")

	var s codeq.State
	require.EqualError(t, s.UnmarshalText([]byte("redy")),
		`codeq: invalid State: "redy" (allowed: ready, scheduled, blocked, leased, dead, done or canceled)`)
}
