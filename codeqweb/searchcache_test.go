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

// TestSearchCache: a slow search for what belongs to a task is repeated only after a pause, and one
// search runs at a time.
func TestSearchCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSearchCache[foundChildren]()
		ctx := t.Context()
		searches := 0
		ask := func(id byte, takes time.Duration, failure error) (number int, err error) {
			found, err := c.of(ctx, codeq.ID{id}, func(context.Context) (foundChildren, error) {
				searches++
				n := searches
				time.Sleep(takes)
				if failure != nil {
					return foundChildren{more: true}, failure
				}
				return foundChildren{children: []relative{{ID: codeq.ID{byte(n)}}}}, nil
			})
			if len(found.children) == 0 {
				return 0, err
			}
			return int(found.children[0].ID[0]), err
		}
		require1 := func(want int, id byte, takes time.Duration) {
			t.Helper()
			got, err := ask(id, takes, nil)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
		require1(1, 1, time.Second)
		require1(2, 2, time.Second)
		time.Sleep(searchPause*time.Second - 2*time.Second)
		require1(1, 1, time.Second)
		time.Sleep(time.Second)
		require1(3, 1, 0)
		require1(2, 2, time.Second)
		require1(4, 1, 0)

		// A search that fails after a long time is not repeated at once either.
		begin := time.Now()
		_, err := ask(3, time.Second, errors.New("it takes too long"))
		require.Error(t, err)
		found, err := c.of(ctx, codeq.ID{3}, nil)
		require.NoError(t, err)
		require.Equal(t, foundChildren{more: true}, found)

		// Viewers of one task share a search. Viewers of other tasks wait for its end, or leave.
		var looking sync.WaitGroup
		for range 5 {
			looking.Go(func() { require1(6, 4, time.Second) })
		}
		synctest.Wait()
		gone, leave := context.WithCancel(ctx)
		leave()
		_, err = c.of(gone, codeq.ID{5}, nil)
		require.ErrorIs(t, err, context.Canceled)
		looking.Wait()
		require.Equal(t, 2*time.Second, time.Since(begin))
		require.Equal(t, 6, searches)

		c.clear()
		require1(7, 4, 0)

		// A viewer that leaves does not end the search for the others.
		leaving, leave := context.WithCancel(ctx)
		_, err = c.of(leaving, codeq.ID{6}, func(ctx context.Context) (foundChildren, error) {
			leave()
			time.Sleep(time.Second)
			return foundChildren{}, ctx.Err()
		})
		require.NoError(t, err)
	})
}

// TestSearchCacheIsBounded: a cache keeps the children of searchesKept tasks.
func TestSearchCacheIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSearchCache[foundChildren]()
		for i := range 2 * searchesKept {
			var id codeq.ID
			binary.BigEndian.PutUint16(id[:], uint16(i))
			c.keep(id, foundValue[foundChildren]{until: time.Now().Add(time.Hour)})
		}
		require.Len(t, c.found, searchesKept)
		time.Sleep(time.Hour)
		c.keep(codeq.ID{}, foundValue[foundChildren]{until: time.Now().Add(time.Hour)})
		require.Len(t, c.found, 1)
	})
}
