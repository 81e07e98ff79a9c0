package codeqweb

import (
	"context"
	"maps"
	"sync"
	"time"

	"codeq"
)

// searchCache caches the result of a search for a task, for searchPause times the duration of the
// search, so that open pages spend a fiftieth of the time in searches at most. One search runs at a
// time.
type searchCache[V any] struct {
	searching chan struct{} // capacity 1: held during a search

	mu    sync.Mutex // guards found
	found map[codeq.ID]foundValue[V]
}

type foundValue[V any] struct {
	value V
	until time.Time
}

const (
	searchesKept = 100 // tasks
	searchPause  = 50  // times the duration of the search
)

func newSearchCache[V any]() searchCache[V] {
	return searchCache[V]{searching: make(chan struct{}, 1)}
}

// of returns what belongs to a task, from the cache or by find. What find returns beside an error
// is for the requests until the next search: so a search does not end when its viewer leaves.
func (c *searchCache[V]) of(ctx context.Context, id codeq.ID, find func(context.Context) (V, error)) (v V, err error) {
	if known, ok := c.known(id); ok {
		return known.value, nil
	}
	if err := enter(ctx, c.searching); err != nil {
		return v, err
	}
	defer func() { <-c.searching }()
	if known, ok := c.known(id); ok { // by the previous search
		return known.value, nil
	}
	begin := time.Now()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTime)
	defer cancel()
	v, err = find(ctx)
	c.keep(id, foundValue[V]{v, time.Now().Add(searchPause * time.Since(begin))})
	return v, err
}

func (c *searchCache[V]) known(id codeq.ID) (found foundValue[V], ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	found = c.found[id]
	return found, time.Now().Before(found.until)
}

func (c *searchCache[V]) keep(id codeq.ID, found foundValue[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(c.found, func(_ codeq.ID, f foundValue[V]) bool { return !now.Before(f.until) })
	if c.found == nil {
		c.found = make(map[codeq.ID]foundValue[V])
	}
	if len(c.found) < searchesKept {
		c.found[id] = found
	}
}

// clear makes the next requests search again, as after a change.
func (c *searchCache[V]) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.found)
}
