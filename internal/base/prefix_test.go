package base

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPrefixed: the name of the package stands once in each line that began with it, and in the
// first one. Names of files stay.
func TestPrefixed(t *testing.T) {
	inner := errors.New("codeq: inner")
	for _, c := range []struct {
		err  error
		want string
	}{
		{errors.New("plain"), "codeq: plain"},
		{inner, "codeq: inner"},
		{fmt.Errorf("codeq: outer: %w", inner), "codeq: outer: inner"},
		{fmt.Errorf("outer (%w); %w, %w", inner, inner, inner), "codeq: outer (inner); inner, inner"},
		{errors.Join(inner, fmt.Errorf("codeq: task: %w", inner), errors.New("plain")), "codeq: inner\ncodeq: task: inner\nplain"},
		{errors.New("open /var/lib/codeq: permission denied"), "codeq: open /var/lib/codeq: permission denied"},
		{fmt.Errorf("codeq: mkdir codeq: %w", inner), "codeq: mkdir codeq: inner"},
	} {
		got := Prefixed(c.err)
		require.Equal(t, c.want, got.Error())
		require.ErrorIs(t, got, c.err)
	}
	require.Same(t, inner, Prefixed(inner), "nothing is made for an error that is right")
}

// TestCorrupt: an error about damage names the file, once that it is damaged, and the next step.
func TestCorrupt(t *testing.T) {
	damage := errors.New("damaged: q/shard-000/000012.sst has another checksum")
	err := Prefixed(Corrupt(damage))
	require.ErrorIs(t, err, ErrCorrupt)
	require.ErrorIs(t, err, damage)
	require.EqualError(t, err, "codeq: stored data is corrupt: q/shard-000/000012.sst has another checksum: Verify says what else is, and what can be repaired")
}
