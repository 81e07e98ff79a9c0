package codeqweb

import (
	"context"
	"encoding/binary"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestChildCache: a slow search for a task's children is repeated only after a pause, and one
// search runs at a time.
func TestChildCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newChildCache()
		ctx := t.Context()
		searches := 0
		ask := func(id byte, takes time.Duration, failure error) (number int, err error) {
			children, _, err := c.of(ctx, codeq.ID{id}, func() (*childList, error) {
				searches++
				n := searches
				time.Sleep(takes)
				if failure != nil {
					return nil, failure
				}
				return &childList{Tasks: []*codeq.TaskInfo{{ID: codeq.ID{byte(n)}}}}, nil
			})
			if len(children) == 0 {
				return 0, err
			}
			return int(children[0].ID[0]), err
		}
		require1 := func(want int, id byte, takes time.Duration) {
			t.Helper()
			got, err := ask(id, takes, nil)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
		require1(1, 1, time.Second)
		require1(2, 2, time.Second)
		time.Sleep(childrenPause*time.Second - 2*time.Second)
		require1(1, 1, time.Second)
		time.Sleep(time.Second)
		require1(3, 1, 0)
		require1(2, 2, time.Second)
		require1(4, 1, 0)

		// A search that fails after a long time is not repeated at once either.
		begin := time.Now()
		_, err := ask(3, time.Second, errors.New("it takes too long"))
		require.Error(t, err)
		children, more, err := c.of(ctx, codeq.ID{3}, nil)
		require.NoError(t, err)
		require.Empty(t, children)
		require.True(t, more)

		// Viewers of one task share a search. Viewers of other tasks wait for its end, or leave.
		var looking sync.WaitGroup
		for range 5 {
			looking.Go(func() { require1(6, 4, time.Second) })
		}
		synctest.Wait()
		gone, leave := context.WithCancel(ctx)
		leave()
		_, _, err = c.of(gone, codeq.ID{5}, nil)
		require.ErrorIs(t, err, context.Canceled)
		looking.Wait()
		require.Equal(t, 2*time.Second, time.Since(begin))
		require.Equal(t, 6, searches)
	})
}

// TestChildCacheIsBounded: a cache keeps the children of childrenKept tasks.
func TestChildCacheIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newChildCache()
		for i := range 2 * childrenKept {
			var id codeq.ID
			binary.BigEndian.PutUint16(id[:], uint16(i))
			c.keep(id, foundChildren{until: time.Now().Add(time.Hour)})
		}
		require.Len(t, c.found, childrenKept)
		time.Sleep(time.Hour)
		c.keep(codeq.ID{}, foundChildren{until: time.Now().Add(time.Hour)})
		require.Len(t, c.found, 1)
	})
}
