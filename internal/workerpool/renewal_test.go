package workerpool_test

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/workerpool"
)

// TestRenewal: leases are renewed three times in their length while there are some. Those that a
// shard has lost are lost at once; if it does not answer, all are: at once, or after the length of
// a lease where there may be a new leader.
func TestRenewal(t *testing.T) {
	for _, waits := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex // guards the variables below
			begin := time.Now()
			var renewed []time.Duration
			lost, failed := make(map[int]time.Duration), error(nil)
			leases := []int{1, 2, 3}
			r := &workerpool.Renewal[int]{
				Heartbeat: workerpool.NewHeartbeat(), For: 3 * time.Second, Now: time.Now, Waits: waits,
				AtWork: func() []int {
					mu.Lock()
					defer mu.Unlock()
					return leases
				},
				Renew: func(of []int) (map[int]error, error) {
					mu.Lock()
					defer mu.Unlock()
					renewed = append(renewed, time.Since(begin))
					if len(renewed) == 2 {
						return map[int]error{2: errors.New("canceled")}, nil
					}
					return nil, failed
				},
				Lose: func(of map[int]error) {
					mu.Lock()
					defer mu.Unlock()
					for k := range of {
						if _, again := lost[k]; !again {
							lost[k] = time.Since(begin)
						}
					}
				},
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				r.Run()
			}()
			defer func() {
				r.Stop()
				<-done
			}()
			time.Sleep(time.Minute)
			mu.Lock()
			require.Empty(t, renewed, "it sleeps")
			begin = time.Now()
			mu.Unlock()
			r.Wake()
			time.Sleep(2500 * time.Millisecond)
			mu.Lock()
			require.Equal(t, []time.Duration{time.Second, 2 * time.Second}, renewed)
			require.Equal(t, map[int]time.Duration{2: 2 * time.Second}, lost)
			failed = errors.New("no answer")
			leases = []int{1, 3}
			mu.Unlock()
			time.Sleep(5 * time.Second)
			mu.Lock()
			defer mu.Unlock()
			at := 3 * time.Second
			if waits {
				at = 5 * time.Second
			}
			require.Equal(t, map[int]time.Duration{1: at, 2: 2 * time.Second, 3: at}, lost)
		})
	}
}
