package codeq

import (
	"context"
	"time"

	"github.com/stretchr/testify/require"
)

// EachDead does something with one dead letter.
func (p *Process) EachDead(how func(context.Context, DeadFilter) (int, error), which DeadFilter) {
	p.T.Helper()
	time.Sleep(time.Millisecond) // those of this millisecond may be left out
	n, err := how(context.Background(), which)
	require.NoError(p.T, err)
	require.Equal(p.T, 1, n)
}
