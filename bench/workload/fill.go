package workload

import (
	"context"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"codeq"
)

// Fill stores n tasks in batches, by several callers, which are spread over the queues. task
// returns the i-th task.
func Fill(ctx context.Context, queues []*codeq.Queue, callers, n, batch int, task func(i int) codeq.Task) error {
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for c := range callers {
		g.Go(func() error {
			tasks := make([]codeq.Task, 0, batch)
			for {
				from := int(next.Add(int64(batch))) - batch
				if from >= n {
					return nil
				}
				tasks = tasks[:0]
				for i := from; i < min(from+batch, n); i++ {
					tasks = append(tasks, task(i))
				}
				if _, err := queues[c%len(queues)].ProduceBatch(ctx, tasks); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}
