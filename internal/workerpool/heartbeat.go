package workerpool

import (
	"sync"
	"time"
)

// Heartbeat sleeps until it is woken, and then beats. Wake and Stop are safe for concurrent use.
type Heartbeat struct {
	woken chan struct{} // capacity 1
	quit  chan struct{}
	once  sync.Once
}

// NewHeartbeat returns a Heartbeat.
func NewHeartbeat() *Heartbeat {
	return &Heartbeat{woken: make(chan struct{}, 1), quit: make(chan struct{})}
}

// Wake ends the sleep.
func (h *Heartbeat) Wake() {
	select {
	case h.woken <- struct{}{}:
	default:
	}
}

// Stop makes Run return.
func (h *Heartbeat) Stop() { h.once.Do(func() { close(h.quit) }) }

// Run calls begin when the sleep ends, and then beat after each interval, until it returns false,
// which begins the next sleep.
func (h *Heartbeat) Run(interval time.Duration, begin func(), beat func() (more bool)) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-h.woken:
		case <-h.quit:
			return
		}
		begin()
		for more := true; more; {
			timer.Reset(interval)
			select {
			case <-timer.C:
			case <-h.quit:
				return
			}
			more = beat()
		}
	}
}
