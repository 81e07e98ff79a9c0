package codeqweb

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestChildCache: children that take long to find are looked for again only after a pause, for
// each task, and all is forgotten in the end.
func TestChildCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c childCache
		found := 0
		ask := func(id byte, takes time.Duration) *childList {
			list, err := c.of(codeq.ID{id}, func() (*childList, error) {
				found++
				time.Sleep(takes)
				return &childList{Scanned: found}, nil
			})
			require.NoError(t, err)
			return list
		}
		require.Equal(t, 1, ask(1, time.Second).Scanned)
		require.Equal(t, 2, ask(2, time.Second).Scanned)
		time.Sleep(childrenPause*time.Second - 2*time.Second)
		require.Equal(t, 1, ask(1, time.Second).Scanned)
		time.Sleep(time.Second)
		require.Equal(t, 3, ask(1, 0).Scanned, "it may be found again")
		require.Equal(t, 2, ask(2, time.Second).Scanned)
		require.Equal(t, 4, ask(1, 0).Scanned, "it took no time")

		_, err := c.of(codeq.ID{3}, func() (*childList, error) { return nil, errors.New("no") })
		require.Error(t, err)
		for i := range byte(200) {
			ask(i, time.Millisecond)
		}
		require.LessOrEqual(t, len(c.found), childrenKept)
		time.Sleep(time.Hour)
		ask(1, time.Second)
		require.Len(t, c.found, 1)
	})
}
