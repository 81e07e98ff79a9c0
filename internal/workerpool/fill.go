package workerpool

import (
	"context"
	"time"
)

// Filling is how a worker fills a batch, by claims in the place that it has.
type Filling[J any] struct {
	Claims context.Context // that of Run
	Ready  int             // how many claims take what is ready, before one waits
	Until  time.Time       // when to wait for more no longer
	// Room is Batches.Room.
	Room func(full context.CancelFunc) int
	// Claim claims jobs for this batch and others, at most room, without waiting or until ctx ends.
	// It returns how many, and those that need places of their own.
	Claim func(ctx context.Context, room int, noWait bool) (n int, others []J, err error)
}

// Fill fills a batch until it is full or the time is over. It returns false if claims have ended
// meanwhile.
func (p *Pool[J, T]) Fill(f *Filling[J]) bool {
	full := f.Room(nil) < 0 // as in a long backlog
	for range f.Ready {
		if full || !p.claimMore(f, true) {
			break
		}
	}
	for !full && time.Until(f.Until) > 0 && p.claimMore(f, false) {
	}
	return f.Claims.Err() == nil
}

// claimMore makes one claim to fill a batch, and reports whether it has brought any jobs: none if
// the batch is full.
func (p *Pool[J, T]) claimMore(f *Filling[J], noWait bool) bool {
	claiming := p.BeginClaim(f.Claims)
	if claiming == nil {
		return false
	}
	n, others := 0, []J(nil)
	defer func() {
		if !p.EndClaim(others, n-len(others)) {
			p.host.GiveBack(others)
		}
	}()
	ctx, stop := context.WithCancel(claiming)
	if !noWait {
		stop()
		ctx, stop = context.WithDeadline(claiming, f.Until)
	}
	defer stop()
	room := f.Room(stop)
	if room == 0 && !noWait {
		<-ctx.Done()
	}
	if room <= 0 {
		return false
	}
	var err error
	n, others, err = f.Claim(ctx, room, noWait)
	return err == nil // if it lasts, a fetcher gets it as well
}
