package store

import (
	"errors"
	"fmt"

	"codeq/internal/guard"
)

// readAheadChunk is how many items ReadAhead hands over together.
const readAheadChunk = 1024

var errStopReading = errors.New("reading was stopped")

// ReadAhead calls visit for each item that read emits, in order. read runs concurrently on its own
// goroutine, which has ended when ReadAhead returns; it must return any error of emit.
func ReadAhead[T any](st *Store, read func(emit func(T) error) error, visit func(T) error) error {
	chunks, stop := make(chan []T, 2), make(chan struct{})
	var failed error
	go func() {
		defer close(chunks)
		guard.Contain(st.log, "opening: reading ahead", func() {
			failed = st.Read(func() error { return readChunks(read, chunks, stop) })
		}, func(value any, _ []byte) { failed = fmt.Errorf("panic in opening: reading ahead: %v", value) })
	}()
	defer func() {
		close(stop)
		for range chunks { // until chunks is closed
		}
	}()
	for chunk := range chunks {
		for _, item := range chunk {
			if err := visit(item); err != nil {
				return err
			}
		}
	}
	return failed
}

// readChunks sends what read emits.
func readChunks[T any](read func(emit func(T) error) error, chunks chan<- []T, stop <-chan struct{}) error {
	var chunk []T
	send := func() error {
		select {
		case chunks <- chunk:
			chunk = nil
			return nil
		case <-stop:
			return errStopReading
		}
	}
	err := read(func(item T) error {
		if chunk = append(chunk, item); len(chunk) < readAheadChunk {
			return nil
		}
		return send()
	})
	if err != nil {
		return err
	}
	return send()
}
