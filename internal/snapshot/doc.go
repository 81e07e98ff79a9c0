// Package snapshot keeps the Raft snapshots of a shard without copying its state: the live Pebble
// store is the snapshot.
//
// A snapshot is a small file of metadata. What it promises is that the store holds, durably, the
// state of the snapshot's index or a later one. A later one does no harm if the state machine skips
// log entries that the store has already.
//
//   - Local: [Sink.Persist] flushes the store, Close replaces the metadata. Raft truncates its log
//     after that.
//   - Sending: [Store.Open] makes a checkpoint of the store, out of hard links, and streams its
//     files. The checkpoint lasts until the reader is closed.
//   - Receiving: the files of a stream go into a new directory. Close makes it durable and then
//     replaces the metadata, which from then on says that this directory is the state: so metadata
//     and state change by one rename.
//
// # Files
//
//	snapshot      metadata: the CRC-32C of the rest in hexadecimal, a newline, JSON
//	snapshot.tmp  metadata being written
//	sending-N     checkpoint being streamed
//	incoming-N    files received; if the metadata says so, the installed state
//
// The next Open removes what a process that died has left.
//
// # Swapping in what was received
//
// Whoever owns the live store does this in FSM.Restore, and after each Open, before it opens the
// live store and begins with Raft:
//
//	dir, _, ok := store.Installed()
//	// if ok:
//	//   1. let live return nil; close the old store, after the calls of its
//	//      Live that are under way
//	//   2. remove its directory, place
//	//   3. rename dir to place
//	//   4. sync the directory that holds place
//	//   5. store.Swapped()
//	// open the store in place and let live return it
//
// A crash before the rename has become durable leaves Installed as it was: the steps are repeated,
// and place is removed again. After it the next Open finds dir gone, records what Swapped would
// have, and Installed reports nothing. That conclusion needs a rename that is atomic over two
// directories, as that of journaling file systems is, or one that loses the new name no later than
// the old.
package snapshot
