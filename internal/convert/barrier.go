package convert

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"codeq/internal/base"
)

// Barrier makes the owners of all shards stand still at the same time. Each stops between two
// operations, when its disk has everything that it has acknowledged and sent, and goes on when it
// is resumed. From the moment at which the last owner has stopped, no shard changes anything, and
// so the stores, read meanwhile, are the queue at one moment.
//
// In a cluster the owners on the leading nodes stand still, and the stores of any node may be read
// after they have applied the entries of the leaders. When an owner goes on, a majority confirms
// that its node still leads, or stores its decisions from before it stopped. So no other leader has
// stored anything before that, and the data that was read is that of the owner. Without that
// confirmation a barrier is invalid.
type Barrier struct {
	owners  Owners
	id      uint64   // random
	asked   int      // number of shards that stand still, or may
	applied []uint64 // in a cluster: by shard, the applied index of its leader
}

// BarrierLimit is how long an owner stands still at the most in a cluster, as the caller's node may
// have died meanwhile.
const BarrierLimit = 5 * time.Second

// Owners are the owners of a queue's shards.
type Owners interface {
	// Count returns how many there are, and whether they may be on other nodes.
	Count() (shards int, cluster bool)
	// Stop makes an owner stand still, and returns the applied index of a leader. stands: it stands
	// still, or may, although there is an error.
	Stop(ctx context.Context, shard int, barrier uint64) (applied uint64, stands bool, err error)
	// Resume makes the first n owners go on. After an error one may not have stood still.
	Resume(ctx context.Context, n int, barrier uint64) error
	// Aside calls f on a goroutine that Close waits for.
	Aside(f func())
}

// Raise returns when all owners stand still, or with an error none. They stop in the order of their
// shards, so that if two nodes raise a barrier, one waits for the other.
func Raise(ctx context.Context, owners Owners) (*Barrier, error) {
	b := &Barrier{owners: owners, id: rand.Uint64()}
	shards, _ := owners.Count()
	for i := range shards {
		applied, stands, err := owners.Stop(ctx, i, b.id)
		if stands {
			b.asked++
		}
		if err != nil {
			b.giveUp()
			if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
				err = fmt.Errorf("%w: %w", err, base.EndOf(ctx))
			}
			return nil, fmt.Errorf("shard %d: %w", i, err)
		}
		b.applied = append(b.applied, applied)
	}
	return b, nil
}

// Resume makes the owners go on. After an error the barrier is invalid.
func (b *Barrier) Resume() error {
	ctx := context.Background()
	if _, cluster := b.owners.Count(); cluster {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, BarrierLimit)
		defer cancel()
	}
	return b.owners.Resume(ctx, b.asked, b.id)
}

// giveUp resumes the owners that may stand still. It does not wait for other nodes: owners that it
// does not reach go on after BarrierLimit.
func (b *Barrier) giveUp() {
	if _, cluster := b.owners.Count(); cluster {
		b.owners.Aside(func() { _ = b.Resume() })
		return
	}
	_ = b.Resume()
}

// cutTries is how often a copy is tried at the most, if shards have not stood still to the end.
const cutTries = 3

// Cut copies the stores at one moment, while all shards stand still, by copyAll, which gets the
// applied index of each leader. So no copy contains a later change than another one; above all,
// none has taken a message that another one has not sent. It returns for how long they have stood
// still.
func (c *Copy) Cut(ctx context.Context, owners Owners, copyAll func(applied []uint64) error) (time.Duration, error) {
	_, cluster := owners.Count()
	var last error // of the try before
	for tries := 1; ; tries++ {
		stood, err := tryCut(ctx, owners, copyAll)
		ended := ctx.Err() != nil && errors.Is(err, ctx.Err())
		if ended && last != nil {
			err = fmt.Errorf("%w: %w", last, err)
		}
		if last = err; !cluster || tries == cutTries || ended || !errors.Is(err, base.ErrNotLeader) && !errors.Is(err, base.ErrUncertain) {
			return stood, err
		}
		if err := c.Empty(); err != nil {
			return 0, err
		}
	}
}

func tryCut(ctx context.Context, owners Owners, copyAll func(applied []uint64) error) (stood time.Duration, err error) {
	b, err := Raise(ctx, owners)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	err = copyAll(b.applied)
	return time.Since(began), errors.Join(err, b.Resume())
}
