#!/usr/bin/env perl
# Counts the words of a text line by line: a handler that stores a checkpoint after each line, resumes from it in the next
# attempt, and stops when it is canceled.
use strict;
use warnings;
use JSON::PP;

$| = 1;    # flush every line
my $json = JSON::PP->new->utf8->canonical;

sub tell_worker { print $json->encode({@_}), "\n" }

sub next_message { my $line = <STDIN>; defined $line ? $json->decode($line) : exit 1 }

my $task  = next_message();
my @lines = split /\n/, $task->{input}{text};
my $done  = $task->{checkpoint} || { lines => 0, words => 0 };

for my $number ($done->{lines} .. $#lines) {
    my @words = split ' ', $lines[$number];
    $done = { lines => $number + 1, words => $done->{words} + @words };
    tell_worker(type => 'progress', fraction => ($number + 1) / @lines);
    tell_worker(type => 'checkpoint', value => $done);
    my $answer = next_message();
    if ($answer->{type} eq 'cancel' or not $answer->{stored}) {
        tell_worker(type => 'error', message => 'stopped half-way', error_type => 'Stopped');
        exit 0;
    }
}
tell_worker(type => 'result', output => { words => $done->{words} });
