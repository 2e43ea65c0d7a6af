// Package lane lets one thing at a time happen to each volume, whoever asks: creation and deletion, registration, attach, stage and
// publish, and their undoing. Different volumes run side by side.
//
// A volume has two names, and so two lanes: one by its name for people, which it has from the beginning, and one by its name for CSI, once
// its plugin has given it one. Whoever makes, forgets or removes a volume takes the one by name first and then the one by key; whoever
// only uses it takes the one by key. Nobody takes a second lane of the same kind, so nobody waits in a circle.
//
// Lanes are in memory: what is under way when the process ends is an open intent of the next one.
package lane
