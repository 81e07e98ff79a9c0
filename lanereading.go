package codeq

import "codeq/internal/engine"

// startSweep has what a sweep of lanes has to know read beside the owner, of what disk has now.
// REQUIRES: as view.
func (s *shard) startSweep(sw *engine.LaneSweep) {
	v, swept := s.view(), &sweptOp{sweep: sw}
	go func() {
		defer v.close() // which the store waits for before it closes
		swept.err = guarded(s.opts.log, "sweep of lanes", func() error {
			return sw.Marks.Read(v.snap, func() bool {
				select {
				case <-s.done:
					return true
				default:
					return false
				}
			})
		})
		_ = s.inbox.pass(swept) // one that is closing sweeps no more
	}()
}

// sweptOp says that what a sweep has to know has been read, or why not.
type sweptOp struct {
	sweep *engine.LaneSweep
	err   error
}

func (op *sweptOp) resolve(s *shard) { s.Swept(op.sweep, op.err) }
func (op *sweptOp) settle(error)     {}
