// Package snapshot keeps the Raft snapshots of a shard without copying its state: the live Pebble
// store is the snapshot.
//
// A snapshot is a small file of metadata. It promises that the store holds, durably, the state of
// the snapshot's index or a later one. A later one is harmless if the state machine skips log
// entries that the store already has.
//
//   - Local: [Sink.Persist] flushes the store, Close replaces the metadata. Raft truncates its log
//     after that.
//   - Sending: [Store.Checkpoint] makes a checkpoint of the store, out of hard links. Its files
//     travel on a connection of their own ([Transfer], [Store.Receive]), before Raft sends
//     the snapshot: its content is the manifest of the files. So Raft waits for no files, neither
//     where they are read nor where they are stored, and a connection that breaks is continued by
//     the next one.
//   - Receiving: the files go into a new directory, which is durable when all have arrived. The
//     sink of a manifest replaces the metadata, which from then on says that this directory is the
//     state: so metadata and state change by one rename.
//
// # Files
//
//	snapshot      metadata: the CRC-32C of the rest in hexadecimal, a newline, JSON
//	snapshot.tmp  metadata being written
//	sending-N     checkpoint being sent
//	receiving-N   files that have been received of one
//	incoming-N    these, once Raft has sent their manifest; if the metadata says so, the installed
//	              state
//
// The next Open removes the leftovers of a process that died.
//
// # Swapping in received files
//
// The owner of the live store does this in FSM.Restore, and after each Open, before it opens the
// live store and starts Raft:
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
// and place is removed again. After the rename, the next Open finds dir gone, records the same as
// Swapped, and Installed reports nothing. That conclusion needs a rename that is atomic over two
// directories, as in journaling file systems, or one that loses the new name no later than the old.
package snapshot
